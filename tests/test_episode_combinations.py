"""Whole runs with episodes in this process, each with another feature of the system, and audited."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from local_runs import train

from grpo_ray.config import Config
from grpo_ray.config.loading import load_config
from grpo_ray.telemetry.rollout_log import read_groups, read_rollouts
from grpo_ray.telemetry.run_files import RunDirectory, read_metrics
from grpo_ray.tools.audit.audit import audit

SMALL = "tests/small_episodes.yaml"
pytestmark = pytest.mark.usefixtures("model_cache")

# Overrides by the feature that they turn on.
FEATURES: dict[str, list[str]] = {
    "plain": [],
    "synchronous": ["weight_sync.max_lag=0"],
    "lag": ["weight_sync.max_lag=3", "generator.num_generators=2"],
    "lora": ["model.adapter.rank=4"],
    "collective": ["weight_sync.transport=collective"],
    "delta": ["weight_sync.delta=true", "model.dtype=bfloat16", "learner.learning_rate=1e-4"],
    "padded": ["learner.share_prompts=never"],
    "several_updates": ["algorithm.epochs_per_batch=2", "algorithm.train_batch_size=6"],
    "proximal": ["algorithm.train_batch_size=6", "algorithm.old_log_probs=proximal",
                 "algorithm.off_policy_correction=truncate_sequence"],
    "gspo": ["algorithm.loss=gspo"],
    "cispo": ["algorithm.loss=cispo"],
    "rloo": ["algorithm.advantage=leave_one_out", "algorithm.aggregation=constant"],
    "kl": ["algorithm.kl.reference=initial", "algorithm.kl.coefficient=0.1"],
    "kl_of_an_adapter": ["model.adapter.rank=4", "algorithm.kl.reference=initial", "algorithm.kl.coefficient=0.1"],
    "curriculum": ["task.curriculum={min_weight: 0.2}", "algorithm.num_steps=10"],
    "colocated": ["generator.colocated=true", "weight_sync.max_lag=0"],
    "not_in_flight": ["weight_sync.in_flight=false"],
    "kept_kv": ["weight_sync.recompute_kv=false"],
    "replay": ["buffer.replay.frac=0.5", "buffer.replay.max_age=4"],
    "lookahead": ["buffer.lookahead=2"],
    "own_transformer": ["model.implementation=grpo_ray"],
    "8bit_moments": ["learner.moments=8bit"],
    "small_micro_batches": ["learner.micro_batch_tokens=40"],
    "two_workers": ["episodes.num_workers=2"],
    "two_scorers": ["scorer.num_scorers=2"],
}  # fmt: skip


def make(*overrides: str) -> Config:
    return load_config(SMALL, list(overrides))


def run(folder: Path, *overrides: str) -> RunDirectory:
    """Train and audit a run; nothing out of the ordinary happens in it."""
    directory = RunDirectory(folder / "run")
    recorder = train(make(*overrides), directory.path)
    report = audit(directory, run_reward_code=True)
    assert report.problems == []
    assert recorder.warnings == []
    rows = read_metrics(directory.metrics_path)
    assert any(row["optim/grad_norm"] for row in rows)
    assert all("episodes/turns/mean" in row for row in rows)
    return directory


@pytest.mark.parametrize("feature", FEATURES)
def test_episodes_train_with(feature: str, tmp_path: Path) -> None:
    run(tmp_path, *FEATURES[feature])
