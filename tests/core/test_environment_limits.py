"""The EnvironmentWorkers' pool: the time that a group may take, with those before it on the same worker."""

import asyncio
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from builders import make_item

from grpo_ray.config import Config
from grpo_ray.core import environment_pool
from grpo_ray.core.environment_pool import EnvironmentPool
from grpo_ray.types import PlayReport, SamplingSettings
from grpo_ray.watch.open_calls import OpenCalls
from grpo_ray.watch.restarts import RestartBudget

SETTINGS = SamplingSettings(num_samples=4, temperature=1.0, top_p=1.0, min_tokens=1, max_tokens=8)


class Worker:
    """A worker with places for as many groups as it has permits; each takes `seconds`."""

    name = "environment-0"

    def __init__(self, num_groups: int, seconds: float, num_stuck: int = 0) -> None:
        self._places, self._seconds, self._num_stuck = asyncio.Semaphore(num_groups), seconds, num_stuck

    def play(self, item: Any, settings: Any, seed: int) -> tuple[Any, Awaitable[PlayReport]]:
        return f"group {item.group_id}", self._play()

    async def _play(self) -> PlayReport:
        async with self._places:
            await asyncio.sleep(self._seconds)
        return PlayReport(5, self._num_stuck)


class Pool(EnvironmentPool):
    replaced: tuple[str, ...] = ()

    async def replace(self, client: Any, error: str) -> None:
        self.replaced += (error,)


def make_pool(worker: Worker, max_concurrent: int, max_seconds: float) -> Pool:
    config = Config.model_validate(
        {
            "model": {"tiny": {}},
            "task": {"kind": "sorting"},
            "algorithm": {"samples_per_prompt": 4},
            "episodes": {"max_concurrent": max_concurrent, "max_seconds": max_seconds},
        }
    )
    actors = SimpleNamespace(environments={worker.name: worker})
    context = SimpleNamespace(config=config, actors=actors, calls=OpenCalls(), log=None)
    budget = RestartBudget("recovery.max_restarts", 20, 0.0)
    return Pool(cast(Any, context), budget, lambda *failure: None)


async def play(pool: Pool, group_id: int) -> tuple[Any, int]:
    async with pool.room(is_alone=False) as worker:
        return await pool.play(worker, make_item(group_id), SETTINGS, "train")


@pytest.mark.slow
def test_groups_that_wait_for_a_place_are_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_pool, "GRACE_S", 0.1)

    async def run() -> tuple[str, ...]:
        pool = make_pool(Worker(2, 0.2), max_concurrent=8, max_seconds=0.25)
        played = await asyncio.gather(*(play(pool, n) for n in range(6)))  # the last begin after 0.4 s
        assert played == [(f"group {n}", 5) for n in range(6)]
        return pool.replaced

    assert asyncio.run(run()) == ()


def test_a_worker_that_does_not_end_a_group_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_pool, "GRACE_S", 0.05)

    async def run() -> tuple[str, ...]:
        pool = make_pool(Worker(1, 60.0), max_concurrent=8, max_seconds=0.05)
        with pytest.raises(TimeoutError, match=r"environment-0 did not end the episodes within 0\.1 s"):
            await play(pool, 0)
        return pool.replaced

    assert len(asyncio.run(run())) == 1


def test_a_worker_with_threads_that_hang_is_replaced_and_its_last_group_is_used() -> None:
    async def run() -> tuple[str, ...]:
        pool = make_pool(Worker(1, 0.0, num_stuck=17), max_concurrent=8, max_seconds=9.0)
        assert await play(pool, 3) == ("group 3", 5)
        return pool.replaced

    assert asyncio.run(run()) == ("17 threads hang in calls of the environment",)
