"""The second guard of staleness in a whole run; and runs with all actors on a real Ray, for other tests."""

import asyncio
from pathlib import Path

import pytest
from local_runs import Recorder, train
from small_run import QUICKSTART, SMALL

from grpo_ray.cluster import session
from grpo_ray.cluster.hosting import ActorGroup
from grpo_ray.config import Config
from grpo_ray.config.loading import load_config
from grpo_ray.core import groups
from grpo_ray.core.controller import Controller
from grpo_ray.core.staleness import Admission
from grpo_ray.records.checkpoint import CheckpointStore
from grpo_ray.records.rollout_log import read_rollouts
from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.run.preparation import check_files, prepare
from grpo_ray.watch.restarts import RestartBudget
from grpo_ray.watch.run_log import RunLog

pytestmark = pytest.mark.usefixtures("model_cache")


def run_actors(config: Config, folder: Path) -> RunDirectory:
    prepared = prepare(config, check_files(config))
    run = RunDirectory(folder)
    run.create(config)
    store = CheckpointStore(run, config.checkpoint)
    with (
        session.connected(),
        session.placed(config) as placement,
        ActorGroup(placement, config, prepared.model, folder) as actors,
    ):
        log, budget = RunLog(run, Recorder()), RestartBudget("recovery.max_restarts", 0, 0.0)
        asyncio.run(Controller(config, prepared, actors, log, store, budget).run())
    return run


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
