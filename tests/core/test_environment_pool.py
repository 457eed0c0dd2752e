"""The EnvironmentPool with workers that fail in every way, without episodes."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders import make_item, make_settings
from local_runs import FakeServing, make_config
from turn_clients import until

from grpo_ray.core import environment_pool
from grpo_ray.core.dispatch import Incarnation
from grpo_ray.core.environment_pool import MAX_STUCK, EnvironmentPool
from grpo_ray.episodes.environment_worker import environment_seed
from grpo_ray.errors import ActorDied, DataLost
from grpo_ray.types import PlayReport

Behaviour = Callable[[str, int], Any]  # (worker, number of the play over all workers) -> report or error


class FakeWorker:
    """An EnvironmentWorker's client, with answers that a test decides."""

    def __init__(self, actors: "FakeActors", name: str) -> None:
        self._actors, self.name = actors, name
        self.serving: list[list[int]] = []
        self.seeds: list[int] = []
        self.known_failures: list[tuple[int, str]] = []
        self.dead, self.hangs = asyncio.Event(), False

    async def ready(self) -> bool:
        return True

    async def serve(self, serving: Mapping[int, Any]) -> None:
        self._check()
        if self.hangs:
            await asyncio.sleep(60)
        self.serving.append(sorted(serving))

    async def failures(self, num_known: int) -> list[tuple[int, str]]:
        while len(self.known_failures) <= num_known:
            self._check()
            await asyncio.sleep(0.001)
        return self.known_failures[num_known:]

    def play(self, item: Any, settings: Any, seed: int) -> tuple[Any, Awaitable[Any]]:
        self.seeds.append(seed)
        return f"group {item.group_id}", self._actors.played(self)

    def _check(self) -> None:
        if self.dead.is_set():
            raise ActorDied(self.name, "killed")


class FakeActors:
    def __init__(self, answer: Behaviour, num_workers: int) -> None:
        self._answer, self.num_plays = answer, 0
        names = [f"environment-{number}" for number in range(num_workers)]
        self.environments = {name: FakeWorker(self, name) for name in names}
        self.starts = dict.fromkeys(names, 1)

    async def played(self, worker: FakeWorker) -> PlayReport:
        number = self.num_plays
        self.num_plays += 1
        result = self._answer(worker.name, number)
        if asyncio.iscoroutine(result):
            result = await result
        if isinstance(result, BaseException):
            raise result
        return result

    def restart(self, name: str) -> FakeWorker:
        self.environments[name].dead.set()
        self.starts[name] += 1
        self.environments[name] = FakeWorker(self, name)
        return self.environments[name]


class Pool(FakeServing):
    def __init__(self, folder: Path, answer: Behaviour, *overrides: str, num_workers: int = 1) -> None:
        config = make_config("recovery.restart_backoff_s=0.001", *overrides)
        super().__init__(folder, config, FakeActors(answer, num_workers))
        self.failed: list[tuple[int, str]] = []
        self.pool = EnvironmentPool(self.context, self.budget, lambda *failure: self.failed.append(failure))

    async def play(self, group_id: int = 7, purpose: str = "train", is_alone: bool = False) -> Any:
        async with self.pool.room(is_alone) as worker:
            return await self.pool.play(worker, make_item(group_id), make_settings(), purpose)


GOOD = PlayReport(12, 0)
PLACES = ("episodes.max_concurrent=8", "algorithm.samples_per_prompt=4", "evaluation.samples_per_prompt=4")


def incarnation(number: int, name: str = "generator-0") -> Incarnation:
    return Incarnation(SimpleNamespace(name=name, number=number))


async def test_a_worker_that_dies_is_replaced_and_the_group_has_the_same_seed_again(tmp_path: Path) -> None:
    pool = Pool(tmp_path, lambda worker, number: GOOD if number else ActorDied(worker, "killed"))
    first = pool.actors.environments["environment-0"]
    async with pool.during():
        with pytest.raises(DataLost, match="environment-0 died: killed"):
            await pool.play()
        assert await pool.play() == ("group 7", 12)
        pool.pool.fail(first, "told late, after its replacement")
        assert await pool.play() == ("group 7", 12)
    assert [*first.seeds, *first.seeds] == pool.actors.environments["environment-0"].seeds
    assert pool.actors.starts == {"environment-0": 2}
    (failed,), (back,) = pool.events("environment_failed"), pool.events("environment_back")
    assert "environment-0 died: killed; it is replaced" in failed
    assert "works again" in back


async def test_a_worker_that_dies_between_groups_is_replaced_at_once(tmp_path: Path) -> None:
    pool = Pool(tmp_path, lambda *_: GOOD)
    async with pool.during():
        pool.pool.serve({"generator-0": incarnation(0)})
        first = pool.actors.environments["environment-0"]
        await until(lambda: [0] in first.serving)
        first.dead.set()
        await until(lambda: pool.actors.starts["environment-0"] == 2)
        await until(lambda: pool.actors.environments["environment-0"].serving == [[0]])
    assert pool.actors.starts == {"environment-0": 2}


@pytest.mark.slow
async def test_a_worker_that_hangs_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The groups of a hung process wait; only a call with a limit shows it."""
    monkeypatch.setattr(environment_pool, "PING_S", 0.02)
    monkeypatch.setattr(environment_pool, "ANSWER_S", 0.1)
    pool = Pool(tmp_path, lambda _, number: GOOD if number else asyncio.sleep(60))
    async with pool.during():
        playing = asyncio.ensure_future(pool.play())
        await asyncio.sleep(0.05)
        pool.actors.environments["environment-0"].hangs = True
        await until(lambda: pool.actors.starts["environment-0"] == 2)
        await asyncio.sleep(0.3)
        playing.cancel()  # Ray fails the calls of a killed actor; this one does not
        assert await pool.play() == ("group 7", 12)
    assert pool.actors.starts == {"environment-0": 2}
    assert "it has not answered for 0.1 s" in pool.events("environment_failed")[0]


@pytest.mark.slow
async def test_a_worker_that_starts_slowly_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_pool, "ANSWER_S", 0.1)
    pool = Pool(tmp_path, lambda *_: GOOD)
    (worker,) = pool.actors.environments.values()
    serve = worker.serve

    async def after_its_start(serving: Mapping[int, Any]) -> None:
        await asyncio.sleep(0.4)
        await serve(serving)

    worker.serve = after_its_start  # type: ignore[method-assign]

    async with pool.during():
        await until(lambda: bool(worker.serving))
    assert pool.actors.starts == {"environment-0": 1}


async def test_a_worker_that_does_not_end_its_episodes_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_pool, "GRACE_S", 0.05)
    short = (*PLACES, "episodes.max_seconds=0.05")
    pool = Pool(tmp_path, lambda _, number: GOOD if number else asyncio.sleep(60), *short)
    async with pool.during():
        with pytest.raises(TimeoutError, match=r"environment-0 did not end the episodes within 0\.1 s"):
            await pool.play()
        assert await pool.play() == ("group 7", 12)
    assert pool.actors.starts == {"environment-0": 2}


@pytest.mark.slow
async def test_groups_waiting_for_a_place_are_not_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker has places for two groups of four; each takes 0.2 s, so the last ones begin after 0.4 s."""
    monkeypatch.setattr(environment_pool, "GRACE_S", 0.1)
    places = asyncio.Semaphore(2)

    async def after_its_turn() -> PlayReport:
        async with places:
            await asyncio.sleep(0.2)
        return GOOD

    pool = Pool(tmp_path, lambda worker, number: after_its_turn(), *PLACES, "episodes.max_seconds=0.25")
    async with pool.during():
        played = await asyncio.gather(*(pool.play(n) for n in range(6)))
    assert played == [(f"group {n}", 12) for n in range(6)]
    assert pool.actors.starts == {"environment-0": 1}


@pytest.mark.parametrize(("num_stuck", "num_starts"), [(MAX_STUCK, 1), (MAX_STUCK + 1, 2)])
async def test_a_worker_with_hung_threads_is_replaced(tmp_path: Path, num_stuck: int, num_starts: int) -> None:
    pool = Pool(tmp_path, lambda worker, number: PlayReport(12, 0 if number else num_stuck))
    async with pool.during():
        with suppress(DataLost):
            assert await pool.play() == ("group 7", 12)
        assert await pool.play() == ("group 7", 12)
    assert pool.actors.starts == {"environment-0": num_starts}


async def test_a_group_that_is_cut_off_does_not_end_the_replacement_that_it_began(tmp_path: Path) -> None:
    """The replacement spends the budget once, and the worker's next group waits until it is ready."""
    pool = Pool(tmp_path, lambda worker, number: GOOD if number else ActorDied(worker, "killed"))
    starting = asyncio.Event()
    async with pool.during():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FakeWorker, "ready", lambda worker: starting.wait())
            playing = asyncio.ensure_future(pool.play())
            await until(lambda: pool.actors.starts["environment-0"] == 2)
            playing.cancel()
            await asyncio.wait({playing})
            await asyncio.sleep(0.05)
            assert pool.events("environment_back") == []
            assert list(pool.pool.replacing) == ["environment-0"]
            starting.set()
            await until(lambda: not pool.pool.replacing)
        assert await pool.play() == ("group 7", 12)
    assert pool.actors.starts == {"environment-0": 2}
    assert len(pool.events("environment_failed")) == len(pool.events("environment_back")) == 1


def test_seeds_differ_by_group_and_purpose_and_repeat_over_validations() -> None:
    seeds = {
        (purpose, group): environment_seed(3, purpose, group)
        for purpose in ("train", "validation 0", "validation 10")
        for group in range(50)
    }
    assert all(0 <= seed < 2**31 for seed in seeds.values())
    assert len({seeds["train", g] for g in range(50)} | {seeds["validation 0", g] for g in range(50)}) == 100
    assert all(seeds["validation 0", g] == seeds["validation 10", g] for g in range(50))


async def test_each_incarnation_of_a_generator_has_its_number_and_its_own_failure(tmp_path: Path) -> None:
    pool = Pool(tmp_path, lambda *_: GOOD, num_workers=2)
    first, second, other = incarnation(0), incarnation(2), incarnation(1, "generator-1")
    async with pool.during():
        pool.pool.serve({"generator-0": first, "generator-1": other})
        workers = list(pool.actors.environments.values())
        await until(lambda: all(worker.serving[-1:] == [[0, 1]] for worker in workers))
        workers[0].known_failures.append((0, "it hangs"))
        await until(lambda: bool(pool.failed))
        pool.pool.serve({"generator-1": other})
        pool.pool.serve({"generator-1": other, "generator-0": second})
        await until(lambda: all(worker.serving[-1] == [1, 2] for worker in workers))
        workers[1].known_failures.append((0, "it hangs"))  # the other worker saw it later
        await until(lambda: len(pool.failed) == 2)
    assert pool.failed == [(0, "it hangs")] * 2


async def test_cancelling_a_play_frees_the_workers_place(tmp_path: Path) -> None:
    pool = Pool(tmp_path, lambda _, number: GOOD if number else asyncio.sleep(60), num_workers=2)
    async with pool.during():
        hanging = asyncio.ensure_future(pool.play(0))
        await asyncio.sleep(0.01)
        hanging.cancel()
        await asyncio.wait({hanging})
        assert hanging.cancelled()
        assert set(pool.pool._num_groups.values()) == {0}
    assert pool.actors.starts == {"environment-0": 1, "environment-1": 1}
