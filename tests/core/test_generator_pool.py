"""The GeneratorPool with actors that fail in every way, without engines; and the start of a run's actors."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from builders import make_item, make_settings
from local_runs import FakeServing, make_config, until
from turn_clients import NUMBERS

from grpo_ray.cluster.placement import names_of
from grpo_ray.core import starting
from grpo_ray.core.pool import GeneratorPool
from grpo_ray.core.stalls import StallWatch
from grpo_ray.core.starting import until_all_ready
from grpo_ray.engines.base import EngineDied
from grpo_ray.errors import ActorDied, DataLost, RunError, Stalled
from grpo_ray.watch.clock import VirtualClock, simulated_by
from grpo_ray.watch.restarts import BudgetUsedUp

Behaviour = Callable[[str, int], Any]  # (actor, how many times it was called before) -> result, or an error


class FakeActors:
    """A Generator and a Scorer with answers that a test decides; `starts` has each one's number of starts."""

    def __init__(self, answer: Behaviour, names: dict[str, list[str]]) -> None:
        self._answer, self.num_calls = answer, dict[str, int]()
        clients = [{name: FakeClient(self, name) for name in of_kind} for of_kind in names.values()]
        self.generators, _, self.scorers, self.teachers, self.environments = clients
        self.starts = dict.fromkeys(self.by_name(), 1)
        self.num_stack_dumps = 0
        self.scored_by: list[str] = []

    async def ask(self, what: str) -> Any:
        number = self.num_calls.get(what, 0)
        self.num_calls[what] = number + 1
        await asyncio.sleep(0)
        result = self._answer(what, number)
        if asyncio.iscoroutine(result):
            result = await result
        if isinstance(result, BaseException):
            raise result
        return result

    def by_name(self) -> dict[str, "FakeClient"]:
        return {**self.generators, **self.scorers, **self.teachers}

    def restart(self, name: str) -> "FakeClient":
        self.starts[name] += 1
        kinds = {"generator": self.generators, "scorer": self.scorers, "teacher": self.teachers}
        clients = kinds.get(name.partition("-")[0], self.environments)
        clients[name] = FakeClient(self, name)
        return clients[name]

    def dump_stacks(self) -> None:
        self.num_stack_dumps += 1


class FakeClient:
    def __init__(self, actors: FakeActors, name: str) -> None:
        self._actors, self.name, self.number = actors, name, next(NUMBERS)

    def ready(self) -> Any:
        return self._actors.ask(f"{self.name} ready")

    def generate(self, *_: Any) -> Any:
        return "group", self._actors.ask("generate")

    def score(self, *_: Any) -> Any:
        self._actors.scored_by.append(self.name)
        return self._actors.ask("score")

    def look_up(self, *_: Any) -> Any:
        return "logprobs", self._actors.ask("look_up")

    def sleep(self) -> Any:
        return self._actors.ask("sleep")

    def wake(self) -> Any:
        return self._actors.ask("wake")


class FakeWeightSync:
    async def retire(self, number: int) -> None: ...

    async def admit(self, client: Any) -> int:
        return 5


class Pool(FakeServing):
    def __init__(self, folder: Path, answer: Behaviour, *overrides: str, max_restarts: int = 5) -> None:
        config = make_config("recovery.restart_backoff_s=0.001", *overrides)
        super().__init__(folder, config, FakeActors(answer, names_of(config)), max_restarts)
        self.pool = GeneratorPool(self.context, FakeWeightSync(), make_settings(), self.budget)

    async def sample(self, purpose: str = "train") -> Any:
        async with self.during():
            return await self.pool.sample(make_item(7), 2, purpose)


def fails(what: str, error: Callable[[], BaseException], times: int = 10**9) -> Behaviour:
    return lambda asked, number: error() if asked == what and number < times else 3


async def test_a_group_whose_data_is_lost_for_ever_is_given_up(tmp_path: Path) -> None:
    """A Scorer on a node with a full disk cannot fetch any group, and does not die."""
    pool = Pool(tmp_path, fails("score", lambda: DataLost("scorer: out of disk")))
    assert await pool.sample() is None
    assert pool.actors.num_calls["generate"] == 5  # twice among others, then recovery.max_group_losses + 1
    assert len(pool.events("group_lost")) == 4
    assert pool.pool.num_retried == 4


TAUGHT = ("distillation.teacher=/some/where", "distillation.engine=torch")


@pytest.mark.parametrize("what", ["generate", "score", "look_up"])
@pytest.mark.parametrize("error", [OSError("Too many open files"), RunError("ended by something else")])
async def test_exceptions_in_all_actors_are_treated_alike(tmp_path: Path, what: str, error: Exception) -> None:
    taught, logprobs = (TAUGHT, "logprobs") if what == "look_up" else ((), None)
    pool = Pool(tmp_path / "a", fails(what, lambda: error, times=3), *taught)
    assert await pool.sample() == ("group", 3, logprobs)
    pool = Pool(tmp_path / "b", fails(what, lambda: error), *taught)
    assert await pool.sample() is None
    assert pool.actors.num_calls["generate"] == pool.actors.num_calls[what] == 4
    assert [repr(error) in text for text in pool.events("group_failed")] == [True] * 4


@pytest.mark.parametrize(("what", "name"), [("generate", "generator-0"), ("score", "scorer")])
async def test_an_actor_that_always_dies_uses_up_the_budget(tmp_path: Path, what: str, name: str) -> None:
    pool = Pool(tmp_path, fails(what, lambda: ActorDied(name, "killed")))

    async def work() -> None:
        async with pool.during():
            while True:
                assert await pool.pool.sample(make_item(7), 2, "train") is None

    with pytest.raises(BudgetUsedUp, match=f"5 restarts within an hour .* error was: {name} died"):
        await work()
    assert pool.actors.starts[name] == 6


@pytest.mark.parametrize("error", [DataLost("the weights are gone"), ActorDied("weight_sync", "killed")])
async def test_a_replacement_without_weights_ends_the_pool_at_once(tmp_path: Path, error: Exception) -> None:
    """The run goes back to its checkpoint: no other process could get these weights, either."""
    pool = Pool(tmp_path, fails("generate", lambda: ActorDied("generator-0", "killed"), times=1))
    pool.pool._weight_sync.admit = AsyncMock(side_effect=error)  # type: ignore[method-assign]

    async def work() -> None:
        async with pool.during():
            await pool.pool.sample(make_item(7), 2, "train")
            await asyncio.Event().wait()

    with pytest.raises(type(error), match=str(error)):
        await work()
    assert pool.actors.starts["generator-0"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(("what", "name"), [("generate", "generator-0"), ("score", "scorer")])
async def test_a_replacement_that_does_not_start_is_replaced_too(tmp_path: Path, what: str, name: str) -> None:
    """The start of an actor on a dead file system hangs."""

    def answer(asked: str, number: int) -> Any:
        if asked == what and number == 0:
            return ActorDied(name, "killed")
        return asyncio.sleep(60) if asked == f"{name} ready" and number == 0 else 3

    pool = Pool(tmp_path, answer, "recovery.start_timeout_s=0.2")
    assert await pool.sample() == ("group", 3, None)
    assert pool.actors.starts[name] == 3
    kind = f"{name.partition('-')[0]}_failed"
    assert f"{name} did not start within 0.2 s (recovery.start_timeout_s)" in pool.events(kind)[1]


@pytest.mark.slow
@pytest.mark.parametrize(("what", "name"), [("score", "scorer"), ("look_up", "teacher-0")])
async def test_the_stall_watch_waits_for_no_replacement(tmp_path: Path, what: str, name: str) -> None:
    """A Scorer or Teacher hangs, and so does its successor: the watch looks on, and the third one works."""

    def answer(asked: str, number: int) -> Any:
        return asyncio.sleep(60) if asked in (what, f"{name} ready") and number == 0 else 3

    pool = Pool(tmp_path, answer, "recovery.start_timeout_s=1.2", *TAUGHT)
    async with pool.during() as tasks:
        tasks.create_task(StallWatch(pool.calls, pool.pool, pool.log, 0.4).run())
        tasks.create_task(pool.pool.sample(make_item(7), 2, "train"))
        await until(lambda: pool.actors.starts[name] >= 3)
        assert pool.actors.num_stack_dumps >= 2  # it kept watching while the first replacement hung
    assert "recovery.stall_timeout_s" in pool.events(f"{name.partition('-')[0]}_failed")[0]


@pytest.mark.slow
async def test_actors_that_start_for_long_are_no_stall(tmp_path: Path) -> None:
    """They are being replaced, which has a limit of its own; here, the groups that found them dead are done."""
    pool = Pool(tmp_path, lambda asked, _: asyncio.sleep(60) if asked.endswith(" ready") else 3)
    kinds = {
        "scorer": pool.pool._scorers, "teacher-0": pool.pool._teachers, "environment-0": pool.pool._environments
    }  # fmt: skip
    pool.actors.starts = dict.fromkeys(kinds, 1)
    async with pool.during():
        for name, actors in kinds.items():
            actors.retire(name, "killed")
        assert pool.pool.being_replaced == kinds.keys()
        with pytest.raises(TimeoutError):  # and not Stalled
            await asyncio.wait_for(StallWatch(pool.calls, pool.pool, pool.log, 0.3).run(), 1.0)
    assert pool.pool.being_replaced == set()
    assert pool.actors.starts == dict.fromkeys(kinds, 2)
    assert pool.actors.num_stack_dumps >= 1


@pytest.mark.slow
async def test_groups_that_are_only_retried_are_a_stall(tmp_path: Path) -> None:
    """A node flaps: the group is sampled again and again, its data is lost each time, and nothing moves."""
    lost = fails("score", lambda: DataLost("the node is gone"))
    overrides = "recovery.max_group_losses=100000", "recovery.max_group_retries=100000"
    pool = Pool(tmp_path, lost, *overrides, "recovery.restart_backoff_s=0")
    async with pool.during() as tasks:
        tasks.create_task(pool.pool.sample(make_item(7), 2, "train"))
        with pytest.raises(Stalled):
            await StallWatch(pool.calls, pool.pool, pool.log, 0.4).run()
    assert pool.actors.num_calls["generate"] > 5


@pytest.mark.slow
@pytest.mark.parametrize("is_working", [True, False])
async def test_a_learner_in_a_long_step_with_progress_is_not_stuck(tmp_path: Path, is_working: bool) -> None:
    pool = Pool(tmp_path, lambda *_: 3)
    num_done = 0

    async def work_done() -> int:
        nonlocal num_done
        num_done += is_working
        return num_done

    error, message = (TimeoutError, "^$") if is_working else (Stalled, "^stuck for 0.4 s: learner$")
    async with pool.during():
        watch = StallWatch(pool.calls, pool.pool, pool.log, 0.4, work_done)
        with pool.calls.call("learner", "trains step 1"):
            pool.calls.progress()  # all is quiet from now on, however long the start took
            with pytest.raises(error, match=message):
                await asyncio.wait_for(watch.run(), 2.0)


async def test_a_generator_starts_before_the_learners_turn_or_after_it(tmp_path: Path) -> None:
    """The colocated Learner fills the device: an engine that starts now would find no memory."""
    pool = Pool(tmp_path, lambda asked, _: asyncio.sleep(0.1) if asked == "generator-0 ready" else 3)
    async with pool.during():
        pool.pool.retire("generator-0", "killed")
        await pool.pool.sleep()
        assert pool.actors.num_calls == {"generator-0 ready": 1, "sleep": 1}
        assert pool.actors.starts["generator-0"] == 2
        pool.pool.retire("generator-0", "killed in that turn")
        await asyncio.sleep(0.05)
        assert pool.actors.starts["generator-0"] == 2
        await pool.pool.wake()
        await until(lambda: bool(pool.pool.serving))
        assert pool.actors.starts["generator-0"] == 3
        assert list(pool.pool.serving) == ["generator-0"]


async def test_an_engine_that_fails_at_its_wake_is_replaced(tmp_path: Path) -> None:
    """Also with an error of vLLM's own, such as EngineDeadError, and if the replacement fails at its start."""

    def answer(asked: str, number: int) -> int:
        if asked == "wake" or (asked == "generator-0 ready" and number == 0):
            raise KeyError("the engine's own")
        return 3

    pool = Pool(tmp_path, answer)
    async with pool.during():
        await pool.pool.wake()
        await until(lambda: pool.actors.starts["generator-0"] >= 3 and bool(pool.pool.serving))


@pytest.mark.slow
async def test_groups_are_shared_among_scorers_and_one_that_dies_is_replaced_alone(tmp_path: Path) -> None:
    """Each group goes to the least busy Scorer; while one is being replaced, the others get its share."""

    def answer(asked: str, number: int) -> Any:
        if asked == "scorer-1 ready":
            return asyncio.sleep(600)
        return ActorDied("scorer-1", "killed") if asked == "score" and number == 1 else asyncio.sleep(0.01, 3)

    pool = Pool(tmp_path, answer, "scorer.num_scorers=3")
    async with pool.during():
        first = [asyncio.create_task(pool.pool.sample(make_item(g), 2, "train")) for g in range(6)]
        assert [await task for task in first] == [("group", 3, None)] * 6
    assert pool.actors.scored_by[:3] == ["scorer-0", "scorer-1", "scorer-2"]
    assert sorted(set(pool.actors.scored_by)) == ["scorer-0", "scorer-1", "scorer-2"]
    assert [pool.actors.starts[f"scorer-{n}"] for n in range(3)] == [1, 2, 1]


# ---- with a teacher ----


async def test_only_groups_to_train_on_are_looked_up_and_all_their_tokens_counted(tmp_path: Path) -> None:
    pool = Pool(tmp_path, lambda asked, _: asyncio.sleep(0.01, 3) if asked == "look_up" else 3, *TAUGHT)
    async with pool.during():
        purposes = enumerate(["train", "validation"] * 5)
        found = await asyncio.gather(*(pool.pool.sample(make_item(n), 2, each) for n, each in purposes))
    assert found == [("group", 3, "logprobs"), ("group", 3, None)] * 5
    assert pool.actors.num_calls["look_up"] == 5
    assert pool.pool.num_looked_up_tokens == 15


async def test_a_group_is_looked_up_while_it_is_scored(tmp_path: Path) -> None:
    """Each waits for the other to have begun."""
    begun = {"score": asyncio.Event(), "look_up": asyncio.Event()}
    other = {"score": "look_up", "look_up": "score"}

    async def meet(asked: str) -> int:
        begun[asked].set()
        await begun[other[asked]].wait()
        return 3

    pool = Pool(tmp_path, lambda asked, number: meet(asked) if asked in begun else 3, *TAUGHT)
    assert await pool.sample() == ("group", 3, "logprobs")


@pytest.mark.parametrize("error", [ActorDied("teacher-0", "killed"), EngineDied("out of memory")])
async def test_a_teacher_that_dies_is_replaced_for_the_same_group(tmp_path: Path, error: Exception) -> None:
    pool = Pool(tmp_path, fails("look_up", lambda: error, times=2), *TAUGHT)
    assert await pool.sample() == ("group", 3, "logprobs")
    assert (pool.actors.num_calls["generate"], pool.actors.num_calls["look_up"]) == (1, 3)
    assert pool.actors.starts["teacher-0"] == 3
    assert len(pool.events("teacher_failed")) == len(pool.events("teacher_back")) == 2


# ---- the start of a run's actors: Generators in waves, with a report of how many are up ----


class Starts(FakeServing):
    """Actors that take their time to start, and the numbers of those that started at the same time."""

    def __init__(self, folder: Path, num_generators: int, *overrides: str) -> None:
        config = make_config(f"generator.num_generators={num_generators}", *overrides)
        super().__init__(folder, config, FakeActors(lambda what, _: self.start(what), names_of(config)))
        self.texts: list[str] = []
        self.log.display.status = self.texts.append  # type: ignore[method-assign]
        self.seconds = dict.fromkeys(self.actors.by_name(), 0.1)
        self.now: set[str] = set()
        self.most = 0
        self.began: list[str] = []

    async def start(self, what: str) -> None:
        name = what.removesuffix(" ready")
        self.began.append(name)
        self.now.add(name)
        self.most = max(self.most, len(self.now - {"scorer"}))
        await asyncio.sleep(self.seconds[name])
        self.now.remove(name)

    def wait(self) -> None:
        with simulated_by(clock := VirtualClock()):
            clock.run(until_all_ready(self.context, FakeClient.ready))


def test_generators_start_in_waves_and_the_others_at_once(tmp_path: Path) -> None:
    starts = Starts(tmp_path, 7, "generator.max_starting=3", "recovery.start_timeout_s=0.25")  # of each wave
    starts.wait()
    assert starts.most == 3
    assert starts.began.index("scorer") <= 3  # it does not wait for a turn
    assert sorted(starts.began) == sorted(starts.actors.by_name())


def test_the_run_says_how_many_actors_are_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "REPORT_S", 0.15)
    monkeypatch.setattr(starting, "NOTICE_S", 0.4)
    starts = Starts(tmp_path, 4, "generator.max_starting=2")
    starts.seconds["generator-3"] = 1.5
    starts.wait()
    first, *reports = starts.texts
    assert first == "starting the actors"
    assert reports[0] == "starting the actors: 3 of 5 are up"  # the first wave, and the Scorer
    waiting = f"4 of 5 are up; still waiting for generator-3 (is the cluster busy? see {tmp_path / 'logs'})"
    assert reports[-1].endswith(waiting)


def test_only_actors_that_had_their_turn_are_late(tmp_path: Path) -> None:
    starts = Starts(tmp_path, 4, "generator.max_starting=2", "recovery.start_timeout_s=0.5")
    starts.seconds |= {"generator-0": 30.0, "generator-1": 30.0}
    with pytest.raises(Stalled, match=r"^generator-0, generator-1 did not start within 0.5 s"):
        starts.wait()


async def test_replacements_start_in_waves_too_and_those_of_one_cause_cost_one_restart(tmp_path: Path) -> None:
    now: set[str] = set()
    most = 0

    async def start(name: str) -> int:
        nonlocal most
        now.add(name)
        most = max(most, len(now))
        await asyncio.sleep(0.02)
        now.remove(name)
        return 3

    waves = ("generator.num_generators=6", "generator.max_starting=2")
    pool = Pool(tmp_path, lambda what, _: start(what), *waves, max_restarts=1)
    async with pool.during():
        for name in list(pool.pool.serving):
            pool.pool.retire(name, "its node died")
        await until(lambda: len(pool.pool.serving) == 6)
    assert most == 2
    assert set(pool.actors.starts.values()) == {1, 2}
