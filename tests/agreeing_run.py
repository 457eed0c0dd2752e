"""A short run of real actors with vLLM: after each sync its sampler and its Learner must agree."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from small_run import QUICKSTART

from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.tools.audit.audit import audit

PROGRAM = str(Path(__file__).with_name("any_reward_cli.py"))


def metrics_of_agreeing_run(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """Train three synchronous steps, check logprobs and the audit, and return the steps' metrics.

    any_reward_cli.py rewards half of the responses of a random model, so each step moves the weights.
    """
    run = RunDirectory(folder / "r")
    arguments = [
        "train", QUICKSTART, f"run.output_dir={folder}", "run.name=r", "algorithm.num_steps=3",
        "algorithm.prompts_per_step=8", "learner.learning_rate=1e-2", "weight_sync.max_lag=0",
        "task.num_validation_prompts=8", "evaluation.every_num_steps=1000", *overrides,
    ]  # fmt: skip
    done = subprocess.run([sys.executable, PROGRAM, *arguments], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr

    metrics = read_metrics(run.metrics_path)
    assert len(metrics) == 3
    assert all(row["optim/grad_norm"] > 0 for row in metrics)
    assert max(row["mismatch/kl"] for row in metrics) < 1e-5
    assert max(row["mismatch/logprob_diff/max"] for row in metrics) < 1e-3
    assert audit(run).problems == []
    return metrics
