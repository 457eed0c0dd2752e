"""Whole runs in this process under every schedule, checked by the rollouts in their files."""

from collections import Counter
from pathlib import Path

import pytest
from local_runs import Killed, kill_after, make_config, train, train_twice
from test_controller import assert_same_run

from grpo_ray.records.rollout_log import DROPPED, FRESH, read_rollouts
from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.tools.audit.audit import audit

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("model_cache", "any_reward")]

SCHEDULES: dict[str, list[str]] = {
    "synchronous": ["weight_sync.max_lag=0"],
    "bounded": ["weight_sync.max_lag=3"],
    "lookahead": ["buffer.lookahead=3", "weight_sync.max_lag=2"],
    "oversampled": ["algorithm.oversample_frac=0.5", "weight_sync.max_lag=0"],
    "oversampled-async": ["algorithm.oversample_frac=0.5", "weight_sync.max_lag=1"],
    "dynamic": ["algorithm.dynamic_sampling_tries=2", "weight_sync.max_lag=0"],
    "dynamic-async": ["algorithm.dynamic_sampling_tries=2", "weight_sync.max_lag=2"],
    "replay": ["buffer.replay.frac=0.5", "buffer.replay.max_age=3"],
    "replay-advantage": ["buffer.replay.frac=0.5", "buffer.replay.sampling=advantage"],
    "colocated": ["weight_sync.max_lag=0", "generator.colocated=true"],
    "several-updates": ["algorithm.epochs_per_batch=2", "algorithm.train_batch_size=4"],
    "everything": [
        "buffer.replay.frac=0.25", "algorithm.dynamic_sampling_tries=1", "buffer.lookahead=2",
        "weight_sync.max_lag=2", "algorithm.epochs_per_batch=2", "algorithm.kl.reference=ema",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "in_flight"),
    [
        *((name, False) for name in SCHEDULES),  # a sync waits for running requests: a schedule could hang
        *((name, True) for name in ("lookahead", "oversampled-async", "dynamic-async", "everything")),
    ],
)
@pytest.mark.kept("colocated-False", "oversampled-async-True", "everything-True")
def test_each_schedule_trains_prompts_once_on_recent_tokens(tmp_path: Path, name: str, in_flight: bool) -> None:
    slow = ["generator.slowdown_s=0.01", "learner.slowdown_s=0.01", f"weight_sync.in_flight={in_flight}"]
    config = make_config(*SCHEDULES[name], *slow, "generator.num_generators=2")
    run = RunDirectory(tmp_path / "run")
    train(config, run.path)
    assert audit(run).problems == []
    metrics = read_metrics(run.metrics_path)
    assert len(metrics) == config.algorithm.num_steps
    assert max(row["lag/max"] for row in metrics) <= config.max_token_age
    files = [run.rollouts_path(row["step"]) for row in metrics]
    uses = Counter(row["use"] for file in files for row in read_rollouts(file))
    assert uses[FRESH] == len(metrics) * config.fresh_per_step * config.algorithm.samples_per_prompt
    assert (uses[DROPPED] > 0) == (config.algorithm.dynamic_sampling_tries > 0)
    assert (max(uses) > 1) == (config.replayed_per_step > 0)


@pytest.mark.parametrize("name", ["dynamic", "replay", "several-updates", "reference"])
@pytest.mark.kept("dynamic")
def test_a_synchronous_run_that_is_interrupted_is_the_same_run(tmp_path: Path, name: str) -> None:
    """A schedule's whole state is in the checkpoint: the same steps follow."""
    options = {**SCHEDULES, "reference": ["algorithm.kl.reference=ema", "algorithm.kl.coefficient=0.1"]}[name]
    config = make_config(*options, "weight_sync.max_lag=0", "buffer.replay.max_age=4")
    whole, parts = RunDirectory(tmp_path / "whole"), RunDirectory(tmp_path / "parts")
    train(config, whole.path)
    train_twice(config, parts.path, kill_after(5, 0.0))
    assert_same_run(whole, parts)


@pytest.mark.parametrize("name", ["lookahead", "oversampled-async", "dynamic-async", "everything"])
@pytest.mark.kept("everything")
def test_kills_lose_nothing_in_asynchronous_schedules(run: RunDirectory, name: str) -> None:
    config = make_config(*SCHEDULES[name], "generator.slowdown_s=0.01", "generator.num_generators=2")
    for num_steps, seconds in ((1, 0.02), (3, 0.0)):
        with pytest.raises(Killed):
            train(config, run.path, kill_after(num_steps, seconds))
    train(config, run.path)
    assert audit(run).problems == []
