"""The example tasks of episodes as whole runs in this process, and their configurations."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from local_runs import train

from grpo_ray.config.loading import load_config
from grpo_ray.run.preparation import check_files

pytestmark = pytest.mark.usefixtures("model_cache")

CONFIGS = ["configs/guess-number.yaml", "configs/calculator.yaml"]
SMALL = [
    "generator.engine=torch",
    "model.tiny.hidden_size=32",
    "model.tiny.num_layers=1",
    "model.tiny.warmup=null",
    "algorithm.num_steps=2",
    "algorithm.prompts_per_step=2",
    "algorithm.samples_per_prompt=2",
    "evaluation.every_num_steps=2",
    "learner.num_cpus=0",
    "generator.num_cpus=0",
    "checkpoint.every_num_steps=2",
    "task.num_validation_prompts=2",
]


@pytest.mark.parametrize("path", CONFIGS)
def test_the_configuration_passes_its_checks(path: str) -> None:
    config = load_config(path, [])
    check_files(config)
    assert config.sampling.min_tokens == 1  # a guess is one digit, or two
    tiny = config.model.tiny
    assert tiny is not None
    assert tiny.hidden_size // tiny.num_heads == 32  # which vLLM's attention on a CPU has


@pytest.mark.slow
def test_two_steps_of_guess_number(tmp_path: Path) -> None:
    config = load_config(CONFIGS[0], SMALL)
    recorder = train(config, tmp_path / "run")
    assert recorder.steps == [1, 2]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "optim/grad_norm" in line]
    assert [line["step"] for line in steps] == [1, 2]
    for line in steps:
        assert line["lag/max"] <= config.weight_sync.max_lag
        assert 1 <= line["episodes/metrics/num_guesses"] <= 5
        assert line["episodes/status/finished"] == 1
    rollouts = list((tmp_path / "run" / "rollouts").rglob("*.parquet"))
    assert sum(pq.read_metadata(file).num_rows for file in rollouts) == 2 * 2 * 2
    assert list((tmp_path / "run" / "checkpoints").glob("step-000002"))
