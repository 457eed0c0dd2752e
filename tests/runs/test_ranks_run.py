"""Whole runs with a Learner of two ranks: real processes, real Ray."""

import asyncio
import os
import re
import signal
import sys
from functools import partial
from pathlib import Path

import any_reward_cli
import local_runs
import psutil
import pytest
import ray.cloudpickle
import torch
from local_runs import Recorder
from run_process import PROGRAM, interrupt, num_lines, output_of, pid_of, resume, start, untimed, wait_for_step
from safetensors.torch import load_file
from small_run import QUICKSTART, SMALL

from grpo_ray.cluster import hosting, kinds, session
from grpo_ray.config.loading import load_config
from grpo_ray.core.controller import Controller
from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.run.preparation import check_files, prepare
from grpo_ray.run.restores import train_through_restores
from grpo_ray.tools.audit.audit import audit

pytestmark = [pytest.mark.ray, pytest.mark.campaign, pytest.mark.usefixtures("model_cache", "any_reward")]
EXACT = ("weight_sync.max_lag=0", "algorithm.num_steps=7", "learner.num_ranks=2")


def compared(run: RunDirectory) -> list[dict[str, object]]:
    rows = [untimed(row) for row in read_metrics(run.metrics_path)]
    by_the_clock = ("ranks/slowest", "collectives_s")
    return [{name: v for name, v in row.items() if not name.endswith(by_the_clock)} for row in rows]


def tensors_of(checkpoint: Path) -> dict[str, list[torch.Tensor]]:
    """Return every tensor of a checkpoint, with its shards in the order of the ranks."""
    tensors: dict[str, list[torch.Tensor]] = {}
    for file in sorted(checkpoint.rglob("*.safetensors")):
        for name, tensor in load_file(file).items():
            tensors.setdefault(name, []).append(tensor)
    return tensors


def test_a_run_of_two_ranks_that_is_resumed_equals_one_that_was_not(tmp_path: Path) -> None:
    """To the last bit with as many ranks; then it goes on with one."""
    cut, whole = RunDirectory(tmp_path / "cut"), RunDirectory(tmp_path / "whole")
    uninterrupted = start(whole.path, *EXACT)
    process = start(cut.path, *EXACT, "learner.slowdown_s=0.5")
    wait_for_step(process, cut.path, 3)
    interrupt(process, cut.path)
    assert 3 <= len(read_metrics(cut.metrics_path)) < 7
    assert uninterrupted.wait(timeout=600) == 0, uninterrupted.communicate()[0]
    resume(cut.path, "learner.slowdown_s=0")

    assert compared(whole) == compared(cut)
    assert any(row["optim/grad_norm"] for row in compared(cut))
    saved, expected = (tensors_of(run.checkpoint_path(7)) for run in (cut, whole))
    assert saved.keys() == expected.keys()
    assert any(len(shards) == 2 for shards in saved.values())
    for name, shards in saved.items():
        assert all(map(torch.equal, shards, expected[name])), name
    assert {"logs/learner-0.log", "logs/learner-1.log"} <= {f"logs/{p.name}" for p in cut.logs.iterdir()}

    resume(cut.path, "learner.num_ranks=1", "algorithm.num_steps=9")
    assert audit(cut).problems == []
    assert len(read_metrics(cut.metrics_path)) == 9


@pytest.mark.usefixtures("shared_ray")
def test_a_run_with_a_killed_rank_ends_like_one_rank_that_was_not_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray.cloudpickle.register_pickle_by_value(any_reward_cli)  # Ray's workers cannot import it
    monkeypatch.setattr(kinds, "SCORER", any_reward_cli.KIND)
    exact = ["weight_sync.max_lag=0", "checkpoint.every_num_steps=2", "algorithm.num_steps=6"]
    config = load_config(QUICKSTART, [*SMALL, *exact, "learner.num_ranks=2", "learner.slowdown_s=0.3"])
    run, pids = RunDirectory(tmp_path / "run"), list[int]()
    run.create(config)

    async def kill_one_rank(controller: Controller) -> None:
        running = asyncio.ensure_future(controller.run())
        while not pids and not running.done():
            await asyncio.sleep(0.01)
            if num_lines(run.metrics_path) >= 3:
                pids.extend(pid_of(run.path, f"learner-{rank}") for rank in range(2))
                os.kill(pids[1], signal.SIGKILL)
        await running

    def drive(controller: Controller) -> None:
        asyncio.run(kill_one_rank(controller))

    with session.connected(), session.placed(config) as placement:
        prepared, host = prepare(config, check_files(config)), partial(hosting.ActorGroup, placement)
        train_through_restores(config, prepared, run, Recorder(), host, drive)
    events = {event["kind"]: event for event in read_metrics(run.events_path)}
    assert events["run_failed"]["actor"] == "learner"
    cause = r"learner died: learner-1 on \d+\.\d+\.\d+\.\d+: its worker process has died"
    assert re.match(cause, events["run_failed"]["text"])
    assert "restored" in events
    assert not any(map(psutil.pid_exists, pids))
    assert audit(run).problems == []

    whole = RunDirectory(tmp_path / "whole")
    local_runs.train(load_config(QUICKSTART, [*SMALL, *exact]), whole.path)
    rows = [read_metrics(each.metrics_path) for each in (run, whole)]
    assert [row["step"] for row in rows[0]] == list(range(1, 7))
    for name in ("step", "reward/mean", "rollout/response_tokens"):
        assert [row.get(name) for row in rows[0]] == [row.get(name) for row in rows[1]], name
    for of_ranks, of_one in zip(*rows, strict=True):
        assert of_ranks["optim/grad_norm"] == pytest.approx(of_one["optim/grad_norm"], rel=1e-4)
    assert any(row["optim/grad_norm"] > 0 for row in rows[0])


def test_episodes_train_on_two_ranks_and_the_workers_are_quiet(run: RunDirectory, tmp_path: Path) -> None:
    overrides = ["learner.num_ranks=2", "episodes.confined=true", "episodes.num_workers=2"]
    overrides += [f"run.output_dir={tmp_path}", "run.name=run"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.getcwd()])}
    command = [sys.executable, PROGRAM, "train", "tests/small_episodes.yaml", *overrides]
    assert "EnvironmentWorker x2" in " ".join(output_of(*command, timeout_s=240, env=environment).split())
    assert audit(run, run_reward_code=True).problems == []
    rows = read_metrics(run.metrics_path)
    assert len(rows) == 4
    assert any(row["optim/grad_norm"] for row in rows)
    # Every actor answers with its stage times, also the confined ones.
    assert all({"time/environment-0/play_s", "timing/generate_s"} <= row.keys() for row in rows[1:])
    assert not run.events_path.exists()
    for name in ("environment-0", "environment-1"):
        assert "Traceback" not in (run.logs / f"{name}.log").read_text()
