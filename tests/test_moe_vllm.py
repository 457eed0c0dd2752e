"""Runs of a mixture of experts with real vLLM, from a folder as the hub has it."""

import subprocess
import sys
from pathlib import Path

import pytest
from small_run import QUICKSTART

from grpo_ray.telemetry.run_files import RunDirectory, read_metrics
from grpo_ray.tools.audit.audit import audit

PROGRAM = str(Path(__file__).with_name("any_reward_cli.py"))


@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.usefixtures("any_reward")
def test_sampler_and_learner_agree_after_each_sync(tiny_moe: Path, tmp_path: Path) -> None:
    """The model is random; any_reward_cli.py rewards half of its responses, so each step moves the experts."""
    run = RunDirectory(tmp_path / "r")
    arguments = [
        "train", QUICKSTART, f"run.output_dir={tmp_path}", "run.name=r", "model.tiny=null",
        f"model.path={tiny_moe}", "algorithm.num_steps=3", "algorithm.prompts_per_step=8",
        "learner.learning_rate=1e-2", "weight_sync.max_lag=0", "task.num_validation_prompts=8",
        "evaluation.every_num_steps=1000",
    ]  # fmt: skip
    done = subprocess.run([sys.executable, PROGRAM, *arguments], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr

    metrics = read_metrics(run.metrics_path)
    assert len(metrics) == 3
    assert all(row["optim/grad_norm"] > 0 for row in metrics)
    assert all(row["perf/prompt_frac"] < 0.5 for row in metrics)  # prompts are shared
    assert max(row["mismatch/kl"] for row in metrics) < 1e-5
    assert max(row["mismatch/logprob_diff/max"] for row in metrics) < 1e-3
    assert audit(run).problems == []
