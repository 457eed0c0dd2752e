"""The folders of examples/, trained for two steps in this process; test_environment_training.py has one."""

import re
import runpy
import shutil
from pathlib import Path

import pytest
from local_runs import train

from grpo_ray.config.loading import load_config
from grpo_ray.records.run_files import RunDirectory, read_metrics

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZES = "num_steps=2", "prompts_per_step=4", "samples_per_prompt=2"
SMALL = [
    *(f"algorithm.{size}" for size in SIZES), "generator.engine=torch", "generator.num_gpus=0",
    "learner.num_gpus=0", "sampling.max_tokens=6", "evaluation.every_num_steps=2", "model.dtype=float32",
]  # fmt: skip
TINY = "model.tiny={hidden_size: 32, num_layers: 1, num_heads: 2, num_kv_heads: 1, warmup: null}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "config", "overrides"),
    [
        ("own_loss", "my_loss.yaml", [TINY, "task.num_validation_prompts=4"]),
        ("own_task", "squares.yaml", [TINY]),
    ],
)
@pytest.mark.usefixtures("model_cache")
def test_two_steps(
    folder: str, config: str, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(EXAMPLES / folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    if folder == "own_task":
        runpy.run_path("squares.py", run_name="__main__")
    run = RunDirectory(tmp_path / "run")
    train(load_config(config, [*SMALL, *overrides]), run.path)
    assert [row["step"] for row in read_metrics(run.metrics_path)] == [1, 2]


def test_examples_are_short_and_say_how_to_run_them() -> None:
    folders = [path.parent for path in EXAMPLES.glob("*/README.md")]
    assert len(folders) >= 3
    for folder in folders:
        code = [line for path in folder.glob("*.py") for line in path.read_text().splitlines()]
        assert 0 < len(code) <= 60, folder
        assert re.search(r"^    (grpo-ray train|python examples/)", (folder / "README.md").read_text(), re.M)
