"""Whole runs in this process with `weight_sync.transport: collective`: the same run, and ends that die."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from builders import changed
from local_runs import make_config, train, until
from test_controller import assert_same_run, audit, events, once

from grpo_ray.cluster.local import LocalActors
from grpo_ray.core.controller import Controller
from grpo_ray.errors import FORGED, ActorDied, RunError
from grpo_ray.records.run_files import RunDirectory, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("model_cache", "any_reward")]
COLLECTIVE = "weight_sync.transport=collective"
EXACT = ("weight_sync.max_lag=0", "algorithm.num_steps=4", "weight_sync.checksum=true")


@pytest.mark.parametrize("delta", [False, True])
def test_a_run_over_wires_is_the_run_over_the_object_store(delta: bool, tmp_path: Path) -> None:
    """Deltas go through the object store, and the first version by the wire."""
    exact = (*EXACT, f"weight_sync.delta={delta}", "model.dtype=bfloat16", "learner.learning_rate=1e-5")
    runs = [RunDirectory(tmp_path / name) for name in ("store", "wires")]
    train(make_config(*exact), runs[0].path)
    train(make_config(*exact, COLLECTIVE), runs[1].path)
    assert_same_run(*runs)
    rows = list(read_metrics(runs[1].metrics_path))
    assert any(row["optim/grad_norm"] for row in rows)
    assert any(row.get("weight_sync/sent_frac", 1.0) < 1.0 for row in rows) == delta


async def in_the_middle(actors: LocalActors, name: str) -> None:
    """Hold the next transfer to a Generator once its header has come, and return then."""
    generator = actors.generators[name].actor
    await until(lambda: generator._inbox is not None)
    reached = asyncio.Event()
    loop, channel = asyncio.get_running_loop(), generator._inbox._channel
    receive = channel.receive

    def hold(part: Any, timeout_s: float) -> None:
        receive(part, timeout_s)
        loop.call_soon_threadsafe(reached.set)
        channel.receive = lambda *_: channel.close() or receive(part, timeout_s)

    channel.receive = hold
    await reached.wait()


def test_a_generator_and_a_learner_that_die_in_transfers_are_replaced_and_restored(run: RunDirectory) -> None:
    config = make_config("generator.num_generators=2", "algorithm.num_steps=20", COLLECTIVE)

    async def meddle(actors: LocalActors, controller: Controller) -> None:
        await until(lambda: controller.version >= 3)
        await in_the_middle(actors, "generator-1")
        actors.generators["generator-1"].die()
        await until(lambda: len(controller._pool.serving) == 1)
        await until(lambda: len(controller._pool.serving) == 2)
        await in_the_middle(actors, "generator-0")
        actors.learner.die()
        await asyncio.sleep(60)

    train(config, run.path, once(meddle))
    audit(run, config)
    for kind in ("generator_failed", "generator_back"):
        assert [event["actor"] for event in events(run, kind)] == ["generator-1"]
    (failed,) = events(run, "run_failed")
    assert "learner died" in failed["text"]
    assert len(events(run, "restored")) == 1


def test_a_run_whose_start_a_stranger_disturbed_begins_again(tmp_path: Path) -> None:
    config, run = make_config("algorithm.num_steps=1"), RunDirectory(tmp_path / "run")

    async def disturb(actors: LocalActors, controller: Controller) -> None:
        assert not controller.has_begun
        raise ActorDied("learner", f"RuntimeError: here/1 was written by a process that {FORGED}")

    train(config, run.path, once(disturb))
    assert [event["kind"] for event in read_metrics(run.events_path)][:2] == ["run_failed", "restored"]
    assert len(read_metrics(run.metrics_path)) == 1

    with pytest.raises(RunError, match=rf"2 restores within an hour are used up.*{FORGED}"):
        train(changed(config, recovery={"max_restores": 2}), tmp_path / "always", disturb)
