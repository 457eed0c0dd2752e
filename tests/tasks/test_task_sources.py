"""Datasets on the hub, in its local cache: the files of a split, and errors about missing parts."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from grpo_ray.config.task import FileTaskConfig, Gsm8kTaskConfig, MathTaskConfig
from grpo_ray.tasks import load_examples
from grpo_ray.tasks.examples import Example
from grpo_ray.tasks.sources import is_hub_dataset, train_source, validation_source

COMMIT = "e53f048856ff4f594e959d75785d2c2d37b678ee"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty cache of the hub, without a connection to it."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def cached(hub: Path, name: str, files: dict[str, Any], revision: str = "main") -> Path:
    """Put a dataset into the cache; `files` are a text, or rows for Parquet, by file name."""
    folder = hub / f"datasets--{name.replace('/', '--')}"
    (folder / "refs" / revision).parent.mkdir(parents=True, exist_ok=True)
    (folder / "refs" / revision).write_text(COMMIT)
    snapshot = folder / "snapshots" / COMMIT
    for file, content in files.items():
        path = snapshot / file
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.write_text(content)
        else:
            pq.write_table(pa.Table.from_pylist(content), path)
    return snapshot


def row(number: int) -> list[dict[str, str]]:
    return [{"question": f"{number}?", "answer": f"#### {number}"}]


CARD = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path:
    - socratic/train-*
---
# GSM8K
"""
GSM8K = {
    "README.md": CARD,
    "main/train-00001-of-00002.parquet": row(2),
    "main/train-00000-of-00002.parquet": row(1),
    "main/test-00000-of-00001.parquet": row(3),
    "socratic/train-00000-of-00001.parquet": row(4),
}


def test_gsm8k_by_its_name(hub: Path) -> None:
    snapshot = cached(hub, "openai/gsm8k", GSM8K)
    sets = load_examples(Gsm8kTaskConfig(), seed=0)
    assert sets.train == [Example("1?", "1"), Example("2?", "2")]
    assert sets.validation == [Example("3?", "3")]
    assert sets.train[0].place == f"{snapshot}/main/train-00000-of-00002.parquet, row 1"
    assert train_source(Gsm8kTaskConfig()).name == "openai/gsm8k (train)"


def test_math_by_its_name_takes_the_default_subset(hub: Path) -> None:
    card = "configs:\n- config_name: algebra\n  data_files: algebra/*\n- config_name: default\n  data_files:\n"
    card += "  - {split: train, path: data/train-*}\n  - {split: test, path: data/test-*}\n"
    rows = [{"problem": "p?", "solution": r"\boxed{1}"}]
    files = {"data/train-0.parquet": rows, "data/test-0.parquet": [{**rows[0], "problem": "v?"}]}
    others = {"algebra/train-0.parquet": [{**rows[0], "problem": "twice?"}]}
    cached(hub, "DigitalLearningGmbH/MATH-lighteval", {"README.md": f"---\n{card}---\n", **files, **others})
    sets = load_examples(MathTaskConfig(), seed=0)
    assert (sets.train, sets.validation) == ([Example("p?", "1")], [Example("v?", "1")])


def test_a_subset_and_a_revision(hub: Path) -> None:
    cached(hub, "openai/gsm8k", GSM8K, revision="v2")
    task = Gsm8kTaskConfig(subset="socratic", revision="v2")
    assert [path.name for path in train_source(task).files] == ["train-00000-of-00001.parquet"]
    with pytest.raises(ValueError, match=r"has no split 'test' in 'socratic'; set it to one of train$"):
        validation_source(task)
    with pytest.raises(ValueError, match=r"has no subset 'x'; set task.subset to one of main, socratic$"):
        train_source(Gsm8kTaskConfig(subset="x", revision="v2"))
    with pytest.raises(ValueError, match=r"has several subsets; set task.subset to one of main, socratic$"):
        train_source(Gsm8kTaskConfig(subset=None, revision="v2"))


@pytest.mark.parametrize(
    ("files", "subset", "expected"),
    [
        (["train.jsonl", "test.jsonl", "notes.txt"], None, ["train.jsonl"]),
        (["data/train-0.parquet", "data/train-1.parquet", "data/test-0.parquet"], None,
         ["data/train-0.parquet", "data/train-1.parquet"]),
        (["main/train/0000.parquet", "main/test/0000.parquet", "other/train/0000.parquet"], "main",
         ["main/train/0000.parquet"]),
        (["train.jsonl", "train.parquet", "training.parquet", "pretrain.parquet"], None, ["train.parquet"]),
        (["data/train-0.parquet", "data/train_sft-0.parquet"], None, ["data/train-0.parquet"]),
    ],
)  # fmt: skip
def test_files_without_a_card(hub: Path, files: list[str], subset: str | None, expected: list[str]) -> None:
    snapshot = cached(hub, "me/data", dict.fromkeys(files, "{}"))
    task = FileTaskConfig(train_path="me/data", validation_path="me/data", subset=subset)
    assert train_source(task).files == tuple(snapshot / name for name in expected)


def test_subsets_without_a_card_are_not_mixed(hub: Path) -> None:
    cached(hub, "me/data", dict.fromkeys(["main/train-0.parquet", "socratic/train-0.parquet"], "{}"))
    task = FileTaskConfig(train_path="me/data", validation_path="me/data")
    with pytest.raises(ValueError, match=r"several folders with it; set task.subset to one of main, socratic$"):
        train_source(task)


def test_a_missing_split_is_refused(hub: Path) -> None:
    cached(hub, "me/data", {"data.csv": "q,a"})
    task = FileTaskConfig(train_path="me/data", validation_path="me/data")
    with pytest.raises(ValueError, match=r"task.validation_path: the dataset 'me/data' .* 'test'; look"):
        validation_source(task)


def test_a_missing_dataset_is_refused(hub: Path) -> None:
    with pytest.raises(ValueError, match=r"task.train_path: 'openai/gsm8k' is not a local file") as caught:
        load_examples(Gsm8kTaskConfig(), seed=0)
    assert str(caught.value).endswith("download it beforehand: hf download --repo-type dataset openai/gsm8k")


def test_paths_that_name_a_dataset_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "here").mkdir(parents=True)
    assert is_hub_dataset("openai/gsm8k")
    assert is_hub_dataset("me/data-v1.5")
    for path in ("./a/b", "../a/b", "/a/b", "a", "a/b/c", "data/here"):
        assert not is_hub_dataset(path), path
    for file in ("data/train.jsonl", "data/x.parquet", "a/b.csv"):
        assert not is_hub_dataset(file), file
