"""Actors as Ray actors: how a call fails, what is killed, and the stacks of stuck processes."""

import asyncio
import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray.util
from builders import make_item, make_settings
from conftest import Joining
from run_process import pid_of, until
from small_run import QUICKSTART, SMALL

from grpo_ray.cluster import session
from grpo_ray.cluster.hosting import ActorGroup
from grpo_ray.config.loading import load_config
from grpo_ray.errors import ActorDied, DataLost
from grpo_ray.run.preparation import check_files, prepare
from grpo_ray.types import TrainBatch

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def actors(model_cache: None, joining_ray: Joining, folder: Path) -> Iterator[ActorGroup]:
    config = load_config(QUICKSTART, [*SMALL, "generator.slowdown_s=60"])
    prepared = prepare(config, check_files(config))
    with (
        joining_ray(),
        session.connected(),
        session.placed(config) as placement,
        ActorGroup(placement, config, prepared.model, folder) as group,
    ):
        asyncio.run(all_ready(group))
        yield group


async def all_ready(group: ActorGroup) -> None:
    await asyncio.gather(*(client.ready() for client in group.by_name().values()))


def test_rays_dashboard_has_the_actors_names_and_spilling_is_seen(actors: ActorGroup) -> None:
    """A name that an earlier group of this process used is followed by a number."""
    shown = [name.partition(" (")[0] for name in ray.util.list_named_actors()]
    assert sorted(shown) == sorted(actors.by_name())
    assert actors.spilled_bytes() == 0


async def test_an_actors_own_error_arrives_as_it_is(actors: ActorGroup) -> None:
    with pytest.raises(ValueError, match="has no groups to train on"):
        await actors.learner.train_step(TrainBatch(()))


async def test_an_abandoned_call_is_cancelled_in_the_actor(actors: ActorGroup) -> None:
    generator = actors.generators["generator-0"]
    _, sampled = generator.generate(make_item(0), make_settings())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.ensure_future(sampled), 1.0)
    async with asyncio.timeout(120):
        while "0 groups running" not in await generator.handle.__ray_call__.remote(lambda it: repr(it.actor)):
            await asyncio.sleep(0.05)


async def test_lost_data_and_a_dead_actor_are_different_errors(actors: ActorGroup, folder: Path) -> None:
    """A Generator that dies before its group is sampled is named; the Scorer that gets the reference is not."""
    group, sampled = actors.generators["generator-0"].generate(make_item(0), make_settings())
    os.kill(pid_of(folder, "generator-0"), signal.SIGKILL)
    with pytest.raises(ActorDied, match="generator-0 died: ") as died:
        await sampled
    assert died.value.name == "generator-0"
    with pytest.raises(DataLost, match="scorer: "):
        await actors.scorers["scorer"].score(group)
    assert await actors.scorers["scorer"].ready()

    fresh = actors.restart("generator-0")
    assert await fresh.ready()
    assert actors.generators["generator-0"] is fresh


def test_stuck_processes_write_their_stacks(actors: ActorGroup, folder: Path) -> None:
    actors.dump_stacks()
    for name in actors.by_name():
        log = folder / "logs" / f"{name}.log"
        until(lambda log=log: "most recent call first" in log.read_text())  # type: ignore[misc]


async def test_what_an_actor_has_imported_is_left_out_of_garbage_collections(actors: ActorGroup) -> None:
    call = actors.learner.handle.__ray_call__
    is_enabled, num_left_out = await call.remote(lambda _: (gc.isenabled(), gc.get_freeze_count()))
    assert is_enabled
    assert num_left_out > 100_000
