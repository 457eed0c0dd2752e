"""The two guards against tokens that are too old, and whole schedules under them at any speed."""

import asyncio
import contextlib
import itertools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders import make_completion, make_group, parts, schedule_config
from hypothesis import given, settings
from hypothesis import strategies as st
from test_groups import make_prompts

from grpo_ray.config import Config
from grpo_ray.core.buffer import TrajectoryBuffer
from grpo_ray.core.context import RunContext
from grpo_ray.core.groups import Batch, GroupBook, State
from grpo_ray.core.producer import RolloutProducer
from grpo_ray.core.staleness import Admission, UpdateCounts, oldest_allowed, version_trained_at
from grpo_ray.core.sync import WeightSync
from grpo_ray.errors import DataLost
from grpo_ray.transfer.messages import Snapshot
from grpo_ray.types import NO_VERSION, PromptItem, RolloutGroup, Verdict
from grpo_ray.watch.event_loop import TasksAlongside
from grpo_ray.watch.open_calls import OpenCalls
from grpo_ray.watch.stage_clock import StageClock


def test_admission_limit_by_hand() -> None:
    """Version 0 admits one batch, and one more per version of lag; there is none after the last step."""
    for max_lag, limits in ((0, [4, 8, 12, 20]), (2, [12, 16, 20, 20])):
        for extra in (0, 3):
            admission = Admission(max_lag, 4, num_steps=5, extra_slots=extra)
            assert [admission.limit(version) for version in (0, 1, 2, 9)] == [each + extra for each in limits]


@given(version=st.integers(0, 100), max_lag=st.integers(0, 10), fresh_per_step=st.integers(1, 50))
def test_the_two_guards_agree(version: int, max_lag: int, fresh_per_step: int) -> None:
    """The last group admitted at a version is trained at the last step that still allows that version."""
    last_step = Admission(max_lag, fresh_per_step, num_steps=1000).limit(version) // fresh_per_step
    assert oldest_allowed(version_trained_at(last_step), max_lag) == version
    assert oldest_allowed(version_trained_at(last_step + 1), max_lag) > version  # the next group is too old


# ---- the controller's schedule, without its actors ----


@pytest.fixture(scope="module", autouse=True)
def _turns_are_counted_not_timed() -> Iterator[None]:
    """Use no threads, so that a run depends only on its speeds."""

    async def here(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        await turns(1)
        return function(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("asyncio.to_thread", here)
        yield


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class VersionedGenerator:
    """A Generator that serves the last loaded version; loading takes the given turns of the event loop."""

    def __init__(self, name: str, load_turns: Iterator[int], version: int = 0) -> None:
        self.name, self.version, self._load_turns = name, version, load_turns
        self.number = ord(name)

    async def stage_weights(self, weights: object) -> None:
        await turns(1)

    async def switch(self, phase_timeout_s: float = 60.0) -> dict[str, float]:
        await turns(1 + next(self._load_turns, 1))
        self.version += 1
        await turns(1)
        return {"paused": 0.0}


@dataclass
class Pace:
    """Turns that each operation takes, in cycles, and the properties of the groups."""

    token: Sequence[int] = (0,)
    train: Sequence[int] = (0,)
    load: Sequence[int] = (1,)
    travel: Sequence[int] = (0,)  # of a call, and of its answer
    slow: Mapping[int, int] = field(default_factory=dict)  # by group: more turns before its last token
    has_signal: Sequence[bool] = (True,)
    never_finishes: frozenset[int] = frozenset()
    room: Sequence[int] = (0,)  # until a Generator has room for a group

    def __post_init__(self) -> None:
        names = ("token", "train", "load", "travel", "room")
        self._cycles = {name: itertools.cycle(getattr(self, name)) for name in names}

    def of(self, name: str) -> Iterator[int]:
        return self._cycles[name]


@dataclass
class Trained:
    """The groups that the Learner saw, one list per step."""

    fresh: list[list[int]] = field(default_factory=list)
    replayed: list[list[int]] = field(default_factory=list)
    dropped: list[list[int]] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    replayed_ages: list[int] = field(default_factory=list)
    num_versions: list[int] = field(default_factory=list)  # per fresh group: those that sampled it


class Remote:
    """A client of an actor; its calls and answers each take the given turns."""

    def __init__(self, actor: Any, travel: Iterator[int]) -> None:
        self._actor, self._travel = actor, travel

    def __getattr__(self, method: str) -> Callable[..., Any]:
        async def call(*args: Any) -> Any:
            await turns(next(self._travel))
            answer = await getattr(self._actor, method)(*args)
            await turns(next(self._travel))
            return answer

        return call


class PacedPool:
    """A GeneratorPool with groups of three tokens, each of which takes the given turns."""

    def __init__(self, generators: Sequence[VersionedGenerator], pace: Pace) -> None:
        self._generators, self._pace = generators, pace

    async def sample(
        self, item: PromptItem, num_samples: int, purpose: str, on_dispatch: Callable[[], None]
    ) -> tuple[RolloutGroup, Verdict, None] | None:
        pace, group_id = self._pace, item.group_id
        await turns(next(pace.of("room")))  # until a Generator has room
        on_dispatch()
        generator, versions = self._generators[group_id % 2], []
        for token in range(3):
            await turns(next(pace.of("token")) + pace.slow.get(group_id, 0) * (token == 2))
            versions.append(generator.version)
        if group_id in pace.never_finishes:
            return None
        signal = float(pace.has_signal[(group_id + item.num_cuts) % len(pace.has_signal)])
        completions = [make_completion([5, 6, 7], versions=versions)] * num_samples
        return *parts(make_group(item, completions, [1, 0], [signal, -signal])), None


class Schedule:
    """RolloutProducer on the plain actor classes, with short forms of the Controller's methods."""

    def __init__(
        self, config: Config, pace: Pace, trained: Trained, version: int = 0,
        checkpoint: Path | None = None, book_state: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.config, self.pace, self.trained, self.version = config, pace, trained, version
        self.book_state = book_state
        generators = [VersionedGenerator(name, pace.of("load"), version) for name in ("a", "b")]
        self.sync = WeightSync(generators, phase_timeout_s=5, version=version)
        self.buffer = TrajectoryBuffer(config, None, checkpoint)
        self.book = GroupBook(config, make_prompts(7), version)
        buffer, sync = (Remote(actor, pace.of("travel")) for actor in (self.buffer, self.sync))
        self.actors: Any = SimpleNamespace(buffer=buffer, weight_sync=sync)
        log: Any = SimpleNamespace(event=lambda *_, **facts: None)
        context = RunContext(config, self.actors, OpenCalls(), log, StageClock((), rest="idle"))
        self.producer = RolloutProducer(context, self.book, PacedPool(generators, pace))

    async def run(self, last_step: int) -> None:
        async with TasksAlongside() as self.tasks:
            await self.producer.begin(self.book_state)
            self.tasks.create_task(self.producer.run(self.tasks))
            await self.train(last_step)

    async def train(self, last_step: int) -> None:
        published: asyncio.Task[None] | None = None
        for step in range(self.version + 1, last_step + 1):
            await self.next_batch(step)
            await turns(next(self.pace.of("train")))
            self.producer.step_trained(step)
            self.version = step
            if published is not None:
                await published
            published = self.tasks.create_task(self.publish(self.version))
        if published is not None:
            await published

    async def next_batch(self, step: int) -> Batch:
        version = version_trained_at(step)
        chosen = await self.producer.next_batch(step)
        ids = chosen.group_ids, chosen.dropped_ids
        batch, _ = await self.actors.buffer.take(step, *ids, chosen.oldest_version)
        assert chosen.num_refused == 0  # admission suffices: the second guard never refuses
        fresh = [group for group in batch.groups if group.group_id in chosen.group_ids]
        replayed = [group for group in batch.groups if group.group_id not in chosen.group_ids]
        self.trained.fresh.append([group.group_id for group in fresh])
        self.trained.replayed.append([group.group_id for group in replayed])
        self.trained.dropped.append(list(chosen.dropped_ids))
        self.trained.lags.append(version - min(group.rollout.oldest_version for group in fresh))
        self.trained.num_versions += [len({*group.rollout.completions[0].versions}) for group in fresh]
        self.trained.replayed_ages += [version - group.rollout.oldest_version for group in replayed]
        return chosen

    async def publish(self, version: int) -> None:
        async with contextlib.AsyncExitStack() as until_published:
            if not self.config.weight_sync.in_flight:
                await until_published.enter_async_context(self.producer.drained())
            await self.actors.weight_sync.publish(version, Snapshot(None))
            self.producer.published(version)


MAX_TURNS = 12_000  # a run with the slowest groups takes four thousand


async def within_turns(work: Any) -> Any:
    """Run the schedule, and fail if it gets stuck, waiting for something that never happens."""
    task = asyncio.ensure_future(work)
    for _ in range(MAX_TURNS):
        if task.done():
            return await task
        await asyncio.sleep(0)
    task.cancel()
    raise AssertionError(f"the schedule is stuck after {MAX_TURNS} turns")


def make_config(max_lag: int, prompts_per_step: int, **changes: Any) -> Config:
    algorithm = {"num_steps": 6, "prompts_per_step": prompts_per_step, **changes.pop("algorithm", {})}
    weight_sync = {"max_lag": max_lag, **changes.pop("weight_sync", {})}
    return schedule_config(algorithm=algorithm, weight_sync=weight_sync, **changes)


def train(config: Config, pace: Pace, resume_after: int | None = None) -> tuple[Trained, Schedule]:
    """Run all steps; optionally stop after one, and resume from its checkpoint."""
    trained = Trained()

    async def run(folder: Path) -> Schedule:
        schedule, last = Schedule(config, pace, trained), config.algorithm.num_steps
        if resume_after is not None:
            await schedule.run(resume_after)
            await schedule.buffer.capture(resume_after)
            await schedule.buffer.write_captured(folder)
            schedule = Schedule(config, pace, trained, resume_after, folder, schedule.book.state_dict())
        await schedule.run(last)
        return schedule

    with tempfile.TemporaryDirectory() as folder:
        return trained, asyncio.run(within_turns(run(Path(folder))))


SPEEDS = st.lists(st.integers(0, 40), min_size=1, max_size=12)


@st.composite
def paces(draw: st.DrawFn) -> Pace:
    signals = draw(st.lists(st.booleans(), min_size=1, max_size=7))
    aside = draw(st.sets(st.integers(0, 12), max_size=2))
    slow = draw(st.dictionaries(st.integers(0, 12), st.integers(100, 600), max_size=2))
    travel = draw(st.lists(st.integers(0, 8), min_size=1, max_size=7))
    speeds = draw(SPEEDS), draw(SPEEDS), draw(SPEEDS)
    return Pace(*speeds, travel, slow, signals, frozenset(aside), draw(SPEEDS))


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Draw any small configuration that Config allows."""
    max_lag, prompts = draw(st.integers(0, 3)), draw(st.integers(1, 4))
    age, uses = draw(st.integers(1, 3)), draw(st.integers(2, 3))
    replayed = draw(st.sampled_from([n for n in range(prompts) if n <= (prompts - n) * min(age, uses - 1)]))
    lookahead = draw(st.integers(1, max_lag * (prompts - replayed) + 1))  # all that max_lag allows
    oversample = 0.0 if lookahead > 1 else draw(st.sampled_from([0.0, 0.3, 1.0, 2.0]))
    replay = {
        "frac": replayed / prompts, "max_age": max_lag + age, "max_uses": uses,
        "sampling": draw(st.sampled_from(["uniform", "recent", "advantage"])),
    }  # fmt: skip
    return make_config(
        max_lag, prompts,
        algorithm={"oversample_frac": oversample, "dynamic_sampling_tries": draw(st.integers(0, 2))},
        buffer={"lookahead": lookahead, "replay": replay, "max_gib": draw(st.sampled_from([1e-9, 1.0]))},
        weight_sync={"in_flight": draw(st.booleans())},
    )  # fmt: skip


@pytest.mark.slow
@settings(max_examples=75)
@given(config=configs(), pace=paces(), resume_after=st.none() | st.integers(1, 5))
def test_no_token_is_too_old_and_no_group_is_lost(config: Config, pace: Pace, resume_after: int | None) -> None:
    # If as many groups as a batch has never finish, the run ends.
    pace.never_finishes = frozenset(sorted(pace.never_finishes)[: config.algorithm.prompts_per_step - 1])
    trained, schedule = train(config, pace, resume_after)
    num_steps, book = config.algorithm.num_steps, schedule.book
    assert [len(fresh) for fresh in trained.fresh] == [config.fresh_per_step] * num_steps
    assert max(trained.lags) <= config.weight_sync.max_lag
    assert max(trained.replayed_ages, default=0) <= config.buffer.replay.max_age
    if not config.weight_sync.in_flight:  # no group spans a sync
        assert set(trained.num_versions) == {1}

    fresh = [group_id for batch in trained.fresh for group_id in batch]
    dropped = [group_id for batch in trained.dropped for group_id in batch]
    assert sorted([*fresh, *dropped, *book.given_up, *book.unfinished]) == list(range(book.next_id))
    assert (book.num_trained, book.num_dropped) == (len(fresh), len(dropped))
    assert book.given_up <= pace.never_finishes
    in_buffer = {*book.ids_in(State.BUFFERED), *book.ids_in(State.DROPPED)}
    assert in_buffer <= set(asyncio.run(schedule.buffer.begin(book.unfinished)))

    assert max(map(len, trained.dropped)) <= config.algorithm.dynamic_sampling_tries * config.fresh_per_step
    for step, replayed in enumerate(trained.replayed):
        earlier = {group_id for batch in trained.fresh[:step] for group_id in batch}
        assert len(replayed) <= config.replayed_per_step
        assert set(replayed) <= earlier


def test_a_group_that_came_too_late_before_the_checkpoint_is_cut_off_after_it() -> None:
    """The buffer has it, and the driver ended before it heard of that: the second guard would refuse it."""
    pace = Pace(token=[16, 16, 14, 6], load=[0, 17], travel=[4], has_signal=[True, False])
    algorithm = {"oversample_frac": 2.0, "dynamic_sampling_tries": 1}
    train(make_config(0, 1, algorithm=algorithm, buffer={"max_gib": 1e-9}), pace, resume_after=4)


@pytest.mark.parametrize("num_losses", [1, 100])
def test_a_group_that_is_lost_on_its_way_into_the_buffer_is_sampled_again(num_losses: int) -> None:
    """One that is lost again and again ends the attempt: the fault is not its Generator's."""
    trained, losses = Trained(), Counter[int]()
    schedule = Schedule(make_config(1, 2), Pace(token=[1]), trained)
    put = schedule.buffer.put

    async def lose(rollout: RolloutGroup, *rest: Any) -> None:
        losses[rollout.item.group_id] += 1
        if losses[rollout.item.group_id] <= num_losses:
            raise DataLost("the node is gone")
        await put(rollout, *rest)

    schedule.buffer.put = lose  # type: ignore[method-assign]
    run = within_turns(schedule.run(6))
    if num_losses == 1:
        asyncio.run(run)
        assert trained.fresh == [[2 * step, 2 * step + 1] for step in range(6)]
    else:
        with pytest.raises(ExceptionGroup, match="TaskGroup"):
            asyncio.run(run)
        assert max(losses.values()) == 1 + schedule.config.recovery.max_group_losses


def test_one_group_takes_the_place_of_each_that_is_set_aside_or_dropped() -> None:
    """1 and 2 have no signal; a batch may drop two, so 2 is dropped only once 0, before it, is set aside."""
    has_signal = [group_id not in (1, 2) for group_id in range(20)]
    pace = Pace(slow={0: 50}, has_signal=has_signal, never_finishes=frozenset({0}))
    trained, schedule = train(make_config(0, 2, algorithm={"dynamic_sampling_tries": 1}), pace)
    assert trained.fresh == [[2 * step + 3, 2 * step + 4] for step in range(6)]
    assert trained.dropped == [[1, 2], [], [], [], [], []]
    assert (schedule.book.given_up, schedule.book.next_id) == ({0}, 15)


@pytest.mark.parametrize("replayed", [0, 2])
@pytest.mark.parametrize(("max_lag", "ahead", "late"), [(0, 1, 0), (1, 1, 0), (3, 1, 0), (3, 3, 1), (3, 4, 2)])
def test_fast_generators_run_ahead_by_max_lag(max_lag: int, ahead: int, late: int, replayed: int) -> None:
    """Admission that is tighter than necessary would waste the Generators' time."""
    replay = {"frac": replayed / (2 + replayed), "max_age": 9}
    config = make_config(max_lag, 2 + replayed, buffer={"lookahead": ahead, "replay": replay})
    assert train(config, Pace(train=[200]))[0].lags == [min(step, max_lag - late) for step in range(6)]


# ---- age in optimizer updates ----


def test_ages_in_updates_by_hand() -> None:
    """Steps 1, 2 and 3 have two updates each: both, one and none of them changed the weights."""
    counts = UpdateCounts(max_age=2)
    assert counts.age(NO_VERSION) == 0
    assert counts.age(0) == 0
    counts.now += 1
    assert counts.age(0) == 1  # the second update of step 1, at lag 0
    counts.now += 1
    counts.complete(1)
    assert [counts.age(version) for version in (0, 1)] == [2, 0]
    counts.now += 1
    counts.complete(2)
    assert [counts.age(version) for version in (0, 1, 2)] == [3, 1, 0]
    counts.complete(3)
    assert [counts.age(version) for version in (0, 1, 2, 3)] == [None, 1, 0, 0]  # version 0 is too old by now


def test_ages_in_updates_survive_a_checkpoint_also_of_an_earlier_release() -> None:
    restored, of_an_earlier_release = UpdateCounts(max_age=1), UpdateCounts(max_age=1)
    restored.restore({"updates/1": 2, "updates/2": 4, "version": 2, "skipped_in_a_row": 0}, version=2)
    restored.now += 1
    assert [restored.age(version) for version in (0, 1, 2)] == [None, 3, 1]
    assert restored.state() == {"updates/1": 2, "updates/2": 4}
    of_an_earlier_release.restore({"version": 2}, version=2)
    of_an_earlier_release.now += 1
    assert [of_an_earlier_release.age(version) for version in (1, 2)] == [None, 1]
