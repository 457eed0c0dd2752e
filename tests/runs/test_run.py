"""Staleness and the ledger in whole runs, on a real Ray where calls really run in parallel."""

import asyncio
import json
from pathlib import Path

import pytest
from builders import check_names
from local_runs import Recorder, train
from small_run import QUICKSTART, SMALL

from grpo_ray.cluster import session
from grpo_ray.cluster.hosting import ActorGroup
from grpo_ray.config import Config
from grpo_ray.config.loading import load_config
from grpo_ray.core import groups
from grpo_ray.core.controller import Controller
from grpo_ray.core.staleness import Admission
from grpo_ray.records.checkpoint import make_store
from grpo_ray.records.rollout_log import read_rollouts
from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.run.preparation import check_files, prepare
from grpo_ray.tools.audit.audit import audit
from grpo_ray.watch.restarts import RestartBudget
from grpo_ray.watch.run_log import RunLog

pytestmark = pytest.mark.usefixtures("model_cache")


def run_actors(config: Config, folder: Path) -> RunDirectory:
    prepared = prepare(config, check_files(config))
    run = RunDirectory(folder)
    run.create(config)
    store = make_store(config, run)
    with (
        session.connected(),
        session.placed(config) as placement,
        ActorGroup(placement, config, prepared.model, folder) as actors,
    ):
        log, budget = RunLog(run, Recorder()), RestartBudget("recovery.max_restarts", 0, 0.0)
        asyncio.run(Controller(config, prepared, actors, log, store, budget).run())
    return run


@pytest.mark.ray
@pytest.mark.campaign
@pytest.mark.usefixtures("shared_ray")
def test_lag_is_bounded_and_every_prompt_is_trained_once(tmp_path: Path) -> None:
    """Two Generators run one version ahead of a slow Learner; test_controller.py has more, without Ray."""
    max_lag, num_generators = 1, 2
    schedule = [f"weight_sync.max_lag={max_lag}", "weight_sync.in_flight=true", "learner.slowdown_s=0.15"]
    config = load_config(QUICKSTART, [*SMALL, *schedule, f"generator.num_generators={num_generators}"])
    run = run_actors(config, tmp_path / "run")
    metrics = read_metrics(run.metrics_path)
    assert [row["step"] for row in metrics] == list(range(1, 9))
    assert all(row["lag/max"] <= max_lag for row in metrics)
    assert all(row["lag/rejected"] == 0 for row in metrics)
    assert metrics[-1]["lag/max"] == max_lag  # Generators run ahead as far as they may

    # Each group once, over one epoch and a third, and with the lag that the metrics have.
    assert audit(run).problems == []
    rollouts = [row for s in range(1, 9) for row in read_rollouts(run.rollouts_path(s))]
    assert len({row["generator"] for row in rollouts}) == num_generators

    # Every actor's time is accounted for, in the metrics and in the timeline.
    whole, rows = sum(row["timing/step_s"] for row in metrics), json.loads(run.timeline_path.read_text())
    names = {row["tid"]: row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    generators = {f"generator-{index}" for index in range(num_generators)}
    assert set(names.values()) == {"driver", "learner", "buffer", "scorer", "weight_sync"} | generators
    for tid, name in names.items():
        told = sum(v for row in metrics for k, v in row.items() if k.startswith(f"time/{name}/"))
        drawn = sum(row["dur"] / 1e6 for row in rows if row["ph"] == "X" and row["tid"] == tid)
        # On a busy machine the first and the last question to an actor are late by some tens of milliseconds.
        assert told == pytest.approx(whole, rel=0.02, abs=0.2), name
        assert drawn == pytest.approx(told, abs=0.001), name

    assert not check_names({k: v for row in metrics for k, v in row.items() if k != "step"})


@pytest.mark.slow
def test_a_group_that_slipped_past_admission_is_refused_and_sampled_again(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second guard alone: the book asks for lag 0, and admits one version behind."""
    strict = load_config(QUICKSTART, [*SMALL, "weight_sync.max_lag=0"])
    monkeypatch.setattr(groups, "Admission", lambda max_lag, *others: Admission(max_lag + 1, *others))
    train(strict, run.path)
    metrics = read_metrics(run.metrics_path)
    assert sum(row["lag/rejected"] for row in metrics) > 0
    assert all(row["lag/max"] == 0 for row in metrics)
    trained = [row["group_id"] for s in range(1, 9) for row in read_rollouts(run.rollouts_path(s))]
    assert sorted(trained) == sorted([*range(32), *range(32)])  # two samples each, once
