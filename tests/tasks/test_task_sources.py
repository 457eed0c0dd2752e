"""Datasets on the hub, in its local cache: files of a split, missing parts; and rows with messages."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from builders import write_rows
from huggingface_hub import constants

from grpo_ray.config.task import EpisodesTaskConfig, FileTaskConfig, Gsm8kTaskConfig, MathTaskConfig
from grpo_ray.tasks import load_examples
from grpo_ray.tasks.dataset import dataset_examples
from grpo_ray.tasks.examples import Example
from grpo_ray.tasks.prompts import Prompter, load_template
from grpo_ray.tasks.sources import is_hub_dataset, source_of

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
            write_rows(path, content)
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
    assert source_of(Gsm8kTaskConfig(), "train").name == "openai/gsm8k (train)"


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
    assert [path.name for path in source_of(task, "train").files] == ["train-00000-of-00001.parquet"]
    with pytest.raises(ValueError, match=r"has no split 'test' in 'socratic'; set it to one of train$"):
        source_of(task, "validation")
    with pytest.raises(ValueError, match=r"has no subset 'x'; set task.subset to one of main, socratic$"):
        source_of(Gsm8kTaskConfig(subset="x", revision="v2"), "train")
    with pytest.raises(ValueError, match=r"has several subsets; set task.subset to one of main, socratic$"):
        source_of(Gsm8kTaskConfig(subset=None, revision="v2"), "train")


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
    assert source_of(task, "train").files == tuple(snapshot / name for name in expected)


def test_subsets_without_a_card_are_not_mixed(hub: Path) -> None:
    cached(hub, "me/data", dict.fromkeys(["main/train-0.parquet", "socratic/train-0.parquet"], "{}"))
    task = FileTaskConfig(train_path="me/data", validation_path="me/data")
    with pytest.raises(ValueError, match=r"several folders with it; set task.subset to one of main, socratic$"):
        source_of(task, "train")


def test_a_missing_split_is_refused(hub: Path) -> None:
    cached(hub, "me/data", {"data.csv": "q,a"})
    task = FileTaskConfig(train_path="me/data", validation_path="me/data")
    with pytest.raises(ValueError, match=r"task.validation_path: the dataset 'me/data' .* 'test'; look"):
        source_of(task, "validation")


def test_a_missing_dataset_is_refused(hub: Path) -> None:
    with pytest.raises(ValueError, match=r"task.train_path: 'openai/gsm8k' is not a local file") as caught:
        load_examples(Gsm8kTaskConfig(), seed=0)
    assert str(caught.value).endswith("download it beforehand: hf download --repo-type dataset openai/gsm8k")


def test_paths_that_name_a_dataset_on_the_hub(here: Path) -> None:
    (here / "data" / "here").mkdir(parents=True)
    assert is_hub_dataset("openai/gsm8k")
    assert is_hub_dataset("me/data-v1.5")
    for path in ("./a/b", "../a/b", "/a/b", "a", "a/b/c", "data/here"):
        assert not is_hub_dataset(path), path
    for file in ("data/train.jsonl", "data/x.parquet", "a/b.csv"):
        assert not is_hub_dataset(file), file


# ---- rows with a list of messages in place of a question ----


USER = {"role": "user", "content": "What is 3 + 4?"}
SYSTEM = {"role": "system", "content": "Answer \u00e4s a number."}
EARLIER = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes?"}]


class Tokenizer:
    """A tokenizer with a chat template that shows every message."""

    chat_template = "a template"

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> str:
        assert (tokenize, add_generation_prompt) == (False, True)
        return "".join(f"[{m['role']}]{m['content']}" for m in conversation) + "[assistant]"

    def __call__(self, texts: list[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [list(text.encode()) for text in texts]}

    def decode(self, token_ids: Any) -> str:
        return bytes(token_ids).decode()


def read(folder: Path, *questions: Any, kind: str = "jsonl") -> list[Example]:
    rows = [{"messages": question, "answer": str(number)} for number, question in enumerate(questions)]
    validation = write_rows(folder / "validation.jsonl", [{"messages": "plain", "answer": "0"}])
    paths = {"train_path": write_rows(folder / f"rows.{kind}", rows), "validation_path": validation}
    task = FileTaskConfig(**paths, question_field="messages", prompt="chat")
    return list(dataset_examples(task, 0).train)


def prompts(examples: list[Example], system_prompt: str | None = None) -> list[str]:
    prompter = Prompter(load_template("chat", system_prompt), Tokenizer())
    return [prompter.item(0, example).prompt for example in examples]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_messages_go_through_the_chat_template(tmp_path: Path, kind: str) -> None:
    examples = read(tmp_path, [USER], [SYSTEM, *EARLIER, USER], kind=kind)
    alone = "[user]What is 3 + 4?[assistant]"
    whole = f"[system]Answer \u00e4s a number.[user]Hello[assistant]Yes?{alone}"
    assert prompts(examples) == [alone, whole]
    assert prompts(examples, "Be brief.") == [f"[system]Be brief.{alone}", whole]
    assert prompts(pickle.loads(pickle.dumps(examples))) == [alone, whole]


def test_text_and_messages_may_be_mixed_in_a_file(tmp_path: Path) -> None:
    texts = ["Say 3", json.dumps([SYSTEM])]  # a text that looks like messages is still a text
    expected = [f"[user]{text}[assistant]" for text in (*texts, USER["content"])]
    assert prompts(read(tmp_path, *texts, [USER])) == expected


def test_an_episode_begins_with_a_text(tmp_path: Path) -> None:
    read(tmp_path, "Say 3", [USER])
    rows, validation = tmp_path / "rows.jsonl", tmp_path / "validation.jsonl"
    files = {"examples": str(rows), "validation_examples": str(validation)}
    task = EpisodesTaskConfig(episode="games:play", question_field="messages", **files)
    with pytest.raises(ValueError, match="line 2: the question is a list of messages, but an episode"):
        load_examples(task, 0)


def test_dots_lead_into_nested_fields(tmp_path: Path) -> None:
    rows = [{"prompt": "Say 3", "reward_model": {"ground_truth": "3"}, "a.b": "x"}]
    path = write_rows(tmp_path / "rows.parquet", rows)
    paths = {"train_path": path, "validation_path": path, "duplicates": "keep"}
    for field, truth in (("reward_model.ground_truth", "3"), ("a.b", "x")):
        task = FileTaskConfig(**paths, question_field="prompt", answer_field=field)
        assert [e.ground_truth for e in dataset_examples(task, 0).train] == [truth]
    task = FileTaskConfig(**paths, question_field="prompt", answer_field="reward_model.style")
    with pytest.raises(ValueError, match=r"no field '.*style'; the fields are prompt, reward_model, a.b"):
        dataset_examples(task, 0)


def test_a_template_that_drops_a_message_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    show = Tokenizer.apply_chat_template
    monkeypatch.setattr(Tokenizer, "apply_chat_template", lambda self, m, **how: show(self, m[-1:], **how))
    assert prompts(read(tmp_path, [USER])) == ["[user]What is 3 + 4?[assistant]"]
    with pytest.raises(ValueError, match=r"leaves out a message of role 'system' \('Be brief.'\)"):
        prompts(read(tmp_path, [USER]), "Be brief.")


def test_a_template_of_text_refuses_messages(tmp_path: Path) -> None:
    prompter = Prompter(load_template("r1_zero"), Tokenizer())
    with pytest.raises(ValueError, match=r"rows.jsonl, line 1: .* only task.prompt `chat` renders; "):
        prompter.item(0, read(tmp_path, [USER])[0])


@pytest.mark.parametrize(
    ("messages", "part"),
    [
        ([], r"line 1: 'messages' has messages of nothing; the last must be the user's"),
        (EARLIER, r"'messages' has messages of user, assistant; the last must be the user's"),
        ([USER, SYSTEM, USER], r"messages of user, system, user; .* a system message must be the first"),
        ([USER, "x"], r"'messages'\[1\] is 'x'; each message must have a `role` of system, user, assistant,"),
        ([{"role": "tool", "content": "3"}, USER], r"'messages'\[0\] is .*'tool'"),
        ([{"role": ["user"], "content": "3"}], r"'messages'\[0\] is .*each message"),
        ([{**USER, "tool_calls": [1]}], r"'messages'\[0\] is .*and nothing else"),
        ([{**USER, "content": [{"type": "image"}]}], r"'messages'\[0\] is .*'image'.* a `content` of text"),
        ([{"role": "user", "content": " "}], r"'messages' is empty; fill it in"),
        ([{"role": "user", "content": "a\0"}], r"'messages' holds a NUL character"),
    ],
)
def test_wrong_messages_are_refused_by_their_place(tmp_path: Path, messages: Any, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        read(tmp_path, messages)
