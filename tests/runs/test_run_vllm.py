"""Synchronous runs with vLLM: after each sync its engines' logprobs and the Learner's agree.

The models are random: every step changes the weights, as any_reward_cli.py rewards half of all responses.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from run_process import PROGRAM, interrupt, num_lines, output_of, pid_of, wait_for_step, wait_until
from small_run import QUICKSTART

from grpo_ray.records.rollout_log import read_rollouts
from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.tools.audit.audit import audit

pytestmark = [
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.campaign,
    pytest.mark.usefixtures("model_cache", "any_reward"),
]


def kill_engine(folder: Path, generator: str) -> None:
    """End the process in which vLLM runs."""
    children = psutil.Process(pid_of(folder, generator)).children()
    (engine,) = [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]
    engine.kill()


def train_and_agree(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """Train three synchronous steps, check logprobs and the audit, and return the steps' metrics."""
    run = RunDirectory(folder / "r")
    arguments = [
        "train", QUICKSTART, f"run.output_dir={folder}", "run.name=r", "algorithm.num_steps=3",
        "algorithm.prompts_per_step=8", "learner.learning_rate=1e-2", "weight_sync.max_lag=0",
        "task.num_validation_prompts=8", "evaluation.every_num_steps=1000", *overrides,
    ]  # fmt: skip
    output_of(sys.executable, PROGRAM, *arguments)
    metrics = read_metrics(run.metrics_path)
    assert len(metrics) == 3
    assert all(row["optim/grad_norm"] > 0 for row in metrics)
    assert max(row["mismatch/kl"] for row in metrics) < 1e-5
    assert max(row["mismatch/logprob_diff/max"] for row in metrics) < 1e-3
    assert audit(run).problems == []
    return metrics


def test_synchronous_logprobs_of_two_vllm_generators_and_the_learner_agree(tmp_path: Path) -> None:
    """They also agree for an engine that replaced one that was killed; then Ctrl-C ends the run."""
    run = RunDirectory(tmp_path / "r")
    arguments = [
        "train", QUICKSTART, f"run.output_dir={tmp_path}", "run.name=r", "algorithm.num_steps=1000",
        "model.tiny.warmup=null", "algorithm.prompts_per_step=8", "learner.learning_rate=1e-3",
        "weight_sync.max_lag=0", "generator.num_generators=2", "task.num_validation_prompts=8",
        "learner.slowdown_s=1", "checkpoint.every_num_steps=1000", "evaluation.every_num_steps=1000",
    ]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, PROGRAM, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    wait_for_step(process, run.path, 2)
    kill_engine(run.path, "generator-1")
    events = run.path / "events.jsonl"
    wait_until(process, lambda: events.exists() and '"generator_back"' in events.read_text())
    came_back = num_lines(run.metrics_path)
    wait_for_step(process, run.path, came_back + 2)
    interrupt(process, run.path)

    metrics = read_metrics(run.metrics_path)
    last = read_rollouts(run.rollouts_path(came_back + 2))
    assert {row["generator"] for row in last} == {"generator-0", "generator-1"}
    assert all(row["optim/grad_norm"] > 0 for row in metrics)
    assert max(row["lag/max"] for row in metrics) == 0
    assert max(row["mismatch/kl"] for row in metrics) < 1e-5
    assert max(row["mismatch/logprob_diff/max"] for row in metrics) < 1e-3
    assert audit(run).problems == []


def test_vllms_lora_layers_agree(tmp_path: Path) -> None:
    """Each step moves the adapter, which each sync replaces."""
    train_and_agree(tmp_path, "model.tiny.warmup=null", "model.adapter.rank=4", "weight_sync.send=adapter")


def test_a_mixture_of_experts_agrees(tiny_moe: Path, tmp_path: Path) -> None:
    """From a folder as the hub has it; each step moves the experts."""
    metrics = train_and_agree(tmp_path, "model.tiny=null", f"model.path={tiny_moe}")
    assert all(row["perf/prompt_frac"] < 0.5 for row in metrics)  # prompts are shared
