"""A short form of `make quickstart`."""

from pathlib import Path

import pytest
from run_process import output_of
from small_run import QUICKSTART

from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.tools.experiments.launch import PROGRAM


@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1860)  # of which it needs the most on a busy machine
@pytest.mark.usefixtures("model_cache")
def test_the_quickstart_learns_through_vllm_one_version_behind(tmp_path: Path) -> None:
    """The real model, task, engine and schedule: fewer steps; one thread, as others have a core."""
    command = [*PROGRAM, "train", QUICKSTART, f"run.output_dir={tmp_path}", "run.name=r"]
    command += ["algorithm.num_steps=12", "task.num_validation_prompts=64", "model.tiny.warmup.num_threads=1"]
    output_of(*command, timeout_s=1800)
    run = RunDirectory(tmp_path / "r")
    rewards = {row["step"]: row["reward"] for row in read_metrics(run.evaluations_summary_path)}
    assert rewards[0] < 0.45
    assert rewards[12] >= rewards[0] + 0.15
    assert max(row["lag/max"] for row in read_metrics(run.metrics_path)) == 1
    assert (run.path / "reward_curve.png").read_bytes().startswith(b"\x89PNG")
    assert (run.checkpoint_path(12) / "config.json").exists()
