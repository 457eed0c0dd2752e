"""WeightSync as a plain object: the transaction, its wires, Generators that fail it, and replacements."""

import asyncio
import itertools
import pickle
from collections.abc import Awaitable, Callable
from typing import Any
from unittest.mock import AsyncMock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from turn_clients import NUMBERS, until

from grpo_ray.core.sync import CALLS, PHASES, WeightSync, WeightSyncError
from grpo_ray.errors import ActorDied, DataLost, OutOfDeviceMemory
from grpo_ray.transfer import wires
from grpo_ray.transfer.messages import Meeting, Snapshot, WireError
from grpo_ray.transfer.wires import Wires
from grpo_ray.types import SyncReport
from grpo_ray.watch.clock import VirtualClock

pytestmark = pytest.mark.virtual_time

DONE = [event for call in CALLS for event in (call, f"{call} done")]


class FakeGenerator:
    """A Generator that logs its calls, and hangs, fails or waits at a gate in the given ones."""

    def __init__(self, name: str, hangs: str = "", fails: str = "", error: Exception | None = None) -> None:
        self.name, self.hangs, self.fails = name, hangs, fails
        self.log: list[tuple[str, str]] = []
        self.number = next(NUMBERS)
        self.error = error or RuntimeError("out of memory")
        self.loaded: list[object] = []
        self.joined: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}

    @property
    def asked(self) -> list[str]:
        return [event for event, name in self.log if name == self.name]

    async def _call(self, call: str) -> None:
        self.log.append((call, self.name))
        if call == self.fails:
            raise self.error
        if call == self.hangs:
            await asyncio.Event().wait()
        if call in self.gates:
            await self.gates[call].wait()
        await asyncio.sleep(0.001 if self.name == "a" else 0.003)
        self.log.append((f"{call} done", self.name))

    async def join(self, meeting: Meeting) -> None:
        self.joined.append(meeting.key)

    def stage_weights(self, snapshot: object) -> Awaitable[None]:
        self.loaded.append(snapshot)
        return self._call("stage")

    async def switch(self, phase_timeout_s: float = 60.0) -> dict[str, float]:
        await self._call("switch")
        seconds = 0.25 if self.name == "a" else 0.5
        return {"pause": 0.25, "load": seconds, "finish": 0.0, "resume": 0.0, "paused": 2 * seconds}


def make_sync(
    *generators: FakeGenerator, timeout_s: float = 5.0, version: int = 0, learner: Any = None,
    call: str = "stage",
) -> WeightSync:  # fmt: skip
    return WeightSync(generators, timeout_s, version, None if learner is None else Wires(learner, call))


async def publish(sync: WeightSync, version: int) -> SyncReport:
    return await asyncio.wait_for(sync.publish(version, Snapshot(f"weights {version}")), 120)


async def admit(sync: WeightSync, generator: FakeGenerator) -> int:
    return await asyncio.wait_for(sync.admit(generator), 120)


# ---- the transaction ----


def test_no_generator_pauses_before_all_have_the_weights_and_then_none_waits_for_another() -> None:
    fast, slow = FakeGenerator("a"), FakeGenerator("b")
    slow.log = log = fast.log
    sync = make_sync(fast, slow, timeout_s=600)

    async def run() -> SyncReport:
        slow.gates = {call: asyncio.Event() for call in CALLS}
        publishing = asyncio.ensure_future(publish(sync, 1))
        await until(lambda: ("stage done", "a") in log and ("stage", "b") in log)
        await asyncio.sleep(0.01)
        assert ("switch", "a") not in log
        slow.gates["stage"].set()
        await until(lambda: ("switch done", "a") in log)
        assert ("switch done", "b") not in log
        slow.gates["switch"].set()
        return await publishing

    report = asyncio.run(run())
    assert fast.asked == slow.asked == DONE
    assert [generator.loaded for generator in (fast, slow)] == [["weights 1"]] * 2
    assert (report.version, report.failed) == (1, {})
    assert report.metrics.pop("timing/weight_sync/stage_s") >= 0.002
    of_the_slower = {"pause": 0.25, "load": 0.5, "finish": 0.0, "resume": 0.0, "paused": 1.0}
    assert report.metrics == {f"timing/weight_sync/{phase}_s": s for phase, s in of_the_slower.items()}
    assert {*of_the_slower, "stage"} == {*PHASES, "paused"}
    assert VirtualClock().run(sync.versions()) == {"a": 1, "b": 1}


@pytest.mark.parametrize(("start", "version"), [(0, 0), (0, 2), (5, 1), (5, 5), (5, 7)])
def test_versions_are_consecutive(start: int, version: int) -> None:
    generator = FakeGenerator("a")
    with pytest.raises(ValueError, match=f"version {version} cannot follow {start}"):
        VirtualClock().run(publish(make_sync(generator, version=start), version))
    assert generator.log == []


async def test_other_weights_than_the_generators_started_with_are_sent_as_the_same_version() -> None:
    """An adapter's Generators start with its base; one that is restarted gets the adapted weights as well."""
    generator, fresh = FakeGenerator("a"), FakeGenerator("a")
    sync = make_sync(generator, version=5)
    report = await sync.publish(5, Snapshot("adapted"), is_initial=True)
    assert (report.version, generator.loaded) == (5, ["adapted"])
    await sync.retire(generator.number)
    assert await sync.admit(fresh) == 5
    assert fresh.loaded == ["adapted"]
    with pytest.raises(ValueError, match="version 6 cannot follow 5"):
        await sync.publish(6, Snapshot("weights 6"), is_initial=True)


# ---- Generators that fail the sync ----


def reason(name: str, call: str, hangs: bool) -> str:
    if hangs:
        limit_s = 0.05 if call == "stage" else 0.1
        return f"weight sync: {name} did not finish `{call}` within {limit_s} s (weight_sync.phase_timeout_s)"
    return f"weight sync: {name} failed in `{call}`: out of memory"


@pytest.mark.parametrize("hangs", [True, False])
@pytest.mark.parametrize("call", CALLS)
async def test_generator_that_fails_the_sync_is_named_and_excluded_alone(call: str, hangs: bool) -> None:
    good, bad = FakeGenerator("a"), FakeGenerator("b", **{"hangs" if hangs else "fails": call})
    sync = make_sync(good, bad, timeout_s=0.05)
    report = await publish(sync, 1)
    assert (report.version, report.failed) == (1, {bad.number: reason("b", call, hangs)})
    assert await sync.versions() == {"a": 1}
    assert good.asked == DONE
    assert bad.asked == DONE[: DONE.index(call) + 1]  # nothing after the call that it failed

    bad.hangs = bad.fails = ""
    before = list(bad.log)
    assert (await publish(sync, 2)).failed == {}
    assert bad.log == before  # excluded until it is admitted
    assert good.loaded == ["weights 1", "weights 2"]


async def test_version_is_published_even_if_the_only_generator_failed() -> None:
    sync, fresh = make_sync(FakeGenerator("a", fails="switch")), FakeGenerator("a")
    await publish(sync, 1)
    assert await sync.versions() == {}
    assert (await publish(sync, 2)).failed == {}  # to no Generator
    assert await admit(sync, fresh) == 2
    assert fresh.loaded == ["weights 2"]


async def test_generator_retired_during_a_publish_is_excluded_from_it() -> None:
    good, dead = FakeGenerator("a"), FakeGenerator("b")
    dead.gates["switch"] = asyncio.Event()
    sync = make_sync(good, dead)
    publishing = asyncio.create_task(publish(sync, 1))
    await until(lambda: dead.asked == DONE[: DONE.index("switch") + 1])
    await sync.retire(dead.number)
    dead.gates["switch"].set()
    assert (await publishing).failed == {}
    assert await sync.versions() == {"a": 1}
    before = list(dead.log)
    await publish(sync, 2)
    assert dead.log == before


async def test_lost_snapshot_is_raised_and_no_generator_is_blamed() -> None:
    generators = [FakeGenerator(name, fails="stage", error=DataLost("the node is gone")) for name in "ab"]
    sync = make_sync(*generators)
    with pytest.raises(DataLost, match="the node is gone"):
        await publish(sync, 1)
    assert await sync.versions() == {"a": 0, "b": 0}
    assert await admit(sync, FakeGenerator("c")) == 0  # the transaction is over
    for generator in generators:
        generator.fails = ""
    await publish(sync, 1)
    with pytest.raises(DataLost, match="gone"):
        await admit(sync, FakeGenerator("d", fails="stage", error=DataLost("gone")))
    assert await sync.versions() == dict.fromkeys("abc", 1)


# ---- admitting a replacement ----


async def test_changes_are_sent_to_serving_generators_and_the_whole_to_an_admitted_one() -> None:
    good, fresh = FakeGenerator("a"), FakeGenerator("b")
    sync = make_sync(good, FakeGenerator("b", fails="switch"), version=5)
    await sync.publish(6, Snapshot("whole 6"))
    await sync.publish(7, Snapshot("whole 7", "changes 7"))
    before = list(good.log)
    assert await admit(sync, fresh) == 7
    assert fresh.asked == DONE
    assert good.log == before  # the others keep sampling
    assert await sync.versions() == {"a": 7, "b": 7}
    await sync.publish(8, Snapshot("whole 8", "changes 8"))
    await sync.publish(9, Snapshot("whole 9"))
    assert good.loaded == ["whole 6", "changes 7", "changes 8", "whole 9"]
    assert fresh.loaded == ["whole 7", "changes 8", "whole 9"]
    assert await sync.versions() == {"a": 9, "b": 9}


async def test_generator_admitted_before_the_first_publish_already_has_the_right_weights() -> None:
    fresh, dead = FakeGenerator("b"), FakeGenerator("b")
    sync = make_sync(FakeGenerator("a"), dead, version=5)
    await sync.retire(dead.number)
    assert await sync.versions() == {"a": 5}
    assert await admit(sync, fresh) == 5
    assert fresh.log == []
    assert await sync.versions() == {"a": 5, "b": 5}
    await publish(sync, 6)
    assert fresh.loaded == ["weights 6"]


@pytest.mark.slow
@pytest.mark.parametrize(("call", "hangs"), [("stage", True), ("switch", False)])
async def test_generator_that_cannot_be_admitted_is_named_and_stays_excluded(call: str, hangs: bool) -> None:
    sync = make_sync(FakeGenerator("a"), FakeGenerator("b", fails="switch"), timeout_s=0.05)
    await publish(sync, 1)
    bad, good = FakeGenerator("b", **{"hangs" if hangs else "fails": call}), FakeGenerator("b")
    with pytest.raises(WeightSyncError) as caught:
        await admit(sync, bad)
    assert str(caught.value) == reason("b", call, hangs)
    assert await sync.versions() == {"a": 1}
    before = list(bad.log)
    assert (await publish(sync, 2)).failed == {}
    assert bad.log == before
    assert await admit(sync, good) == 2
    assert good.loaded == ["weights 2"]


class ServingGenerator:
    """A Generator that records what it serves; each phase takes the given turns of the event loop."""

    def __init__(self, name: str, turns: "itertools.cycle[int]") -> None:
        self.name, self.number, self._turns = name, next(NUMBERS), turns
        self.serves, self._is_paused = "weights 0", False

    async def _take_turns(self) -> None:
        for _ in range(next(self._turns)):
            await asyncio.sleep(0)

    async def stage_weights(self, weights: str) -> None:
        assert not self._is_paused, "two transactions at once"
        await self._take_turns()
        self._staged = weights

    async def switch(self, phase_timeout_s: float = 60.0) -> dict[str, float]:
        assert not self._is_paused, "two transactions at once"
        self._is_paused = True
        await self._take_turns()
        self.serves = self._staged
        await self._take_turns()
        self._is_paused = False
        return {"paused": 0.0}


@pytest.mark.slow
@settings(max_examples=100)
@given(
    turns=st.lists(st.integers(0, 5), min_size=1, max_size=12),
    pauses=st.lists(st.integers(0, 30), min_size=4, max_size=4),
)
def test_serving_generators_always_have_the_published_weights(turns: list[int], pauses: list[int]) -> None:
    async def run() -> None:
        speeds = itertools.cycle(turns)
        serving = {name: ServingGenerator(name, speeds) for name in "abc"}
        sync = WeightSync(serving.values(), phase_timeout_s=60)

        async def replace(name: str, pause: int) -> None:
            for _ in range(pause):
                await asyncio.sleep(0)
            await sync.retire(serving[name].number)
            fresh = ServingGenerator(name, speeds)
            version = await sync.admit(fresh)
            serving[name] = fresh
            assert fresh.serves == f"weights {version}"

        async with asyncio.TaskGroup() as tasks:
            for name, pause in zip("bcbc", pauses, strict=True):
                tasks.create_task(replace(name, pause))
            for version in range(1, 5):
                assert (await publish(sync, version)).failed == {}
                for name, runs in (await sync.versions()).items():  # admission opens now
                    assert runs == version
                    assert serving[name].serves >= f"weights {version}"
        assert await sync.versions() == dict.fromkeys("abc", 4)
        assert {generator.serves for generator in serving.values()} == {"weights 4"}

    VirtualClock().run(asyncio.wait_for(run(), 120))


class FakeLearner:
    """The Learner's end; `sends[name]` is called in place of a transfer."""

    name = "learner"

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.sends: dict[str, Callable[[], Awaitable[object]]] = {}
        self.num_wires = 0
        self.is_dead = False

    async def _called(self, *call: Any) -> None:
        self.calls.append(call)
        await asyncio.sleep(0)
        if self.is_dead:
            raise ActorDied("learner", "killed")

    async def open_wire(self, name: str) -> Meeting:
        await self._called("open", name)
        self.num_wires += 1
        return Meeting("127.0.0.1", 1, f"{name}/{self.num_wires}", "gloo", 1, 1.0, b"")

    async def join_wire(self, name: str) -> None:
        await self._called("join", name)

    async def send(self, name: str, version: int) -> None:
        await self._called("send", name, version)
        if name in self.sends:
            await self.sends[name]()

    async def drop_wire(self, name: str) -> None:
        await self._called("drop", name)

    async def release(self, version: int) -> None:
        await self._called("release", version)

    def of(self, *kinds: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] in kinds]


async def without_one(learner: FakeLearner) -> WeightSync:
    """Return a sync that has published version 1, and has excluded one of its two Generators since."""
    dead = FakeGenerator("a")
    sync = make_sync(dead, FakeGenerator("b"), learner=learner)
    await publish(sync, 1)
    await sync.retire(dead.number)
    return sync


async def fail(error: Exception | None, after_s: float = 0.0) -> None:
    """Raise the error after a while, or hang if there is none."""
    if error is None:
        await asyncio.Event().wait()
    await asyncio.sleep(after_s)
    raise error  # type: ignore[misc]


async def test_each_generator_joins_once_and_is_sent_every_version() -> None:
    learner, one, two = FakeLearner(), FakeGenerator("a"), FakeGenerator("b")
    sync = make_sync(one, two, learner=learner)
    for version in (1, 2):
        assert (await publish(sync, version)).failed == {}
    assert sorted(learner.of("open", "join")) == [("join", "a"), ("join", "b"), ("open", "a"), ("open", "b")]
    assert sorted(learner.of("send")) == [("send", n, v) for n in "ab" for v in (1, 2)]
    assert [len(generator.joined) for generator in (one, two)] == [1, 1]
    assert learner.calls[0] == ("release", 1)
    assert learner.of("release") == [("release", 1), ("release", 2)]
    assert learner.of("drop") == []


@pytest.mark.parametrize("call", ["stage", "switch"])
async def test_the_learner_sends_in_the_call_that_receives(call: str) -> None:
    learner, generator = FakeLearner(), FakeGenerator("a")
    generator.gates[call] = asyncio.Event()
    publishing = asyncio.create_task(publish(make_sync(generator, call=call, learner=learner), 1))
    await asyncio.sleep(0.05)
    assert generator.asked[-1] == call
    assert learner.of("send") == [("send", "a", 1)]
    before = generator.log.copy()
    generator.gates[call].set()
    await publishing
    assert before == generator.log[: len(before)]


async def test_a_replacement_joins_and_is_sent_the_published_version() -> None:
    learner = FakeLearner()
    sync = await without_one(learner)
    fresh = FakeGenerator("a")
    assert await admit(sync, fresh) == 1
    assert fresh.joined == ["a/3"]
    assert learner.of("send")[-1] == ("send", "a", 1)
    assert (await publish(sync, 2)).failed == {}
    assert len(fresh.joined) == 1


GONE, SILENT, KILLED = WireError("the other end is gone"), WireError("gone or silent"), ActorDied("a", "killed")


@pytest.mark.parametrize(
    ("of_generator", "of_send", "reason"),
    [
        ((KILLED, 0.0), None, "a failed in `stage`: a died: killed"),
        ((KILLED, 0.05), GONE, "a failed in `stage`: a died: killed"),
        ((None, 0.0), SILENT, "gone or silent"),
        ((None, 0.0), None, "a did not finish `stage` within 0.2 s"),
    ],
    ids=["its error first", "its error last", "it says nothing", "both hang"],
)
async def test_a_generator_that_fails_a_transfer_is_retired_alone_with_its_own_error(
    monkeypatch: pytest.MonkeyPatch, of_generator: Any, of_send: WireError | None, reason: str
) -> None:
    monkeypatch.setattr(wires, "GRACE_S", 0.1)
    learner, bad, good = FakeLearner(), FakeGenerator("a"), FakeGenerator("b")
    bad.stage_weights = lambda snapshot: fail(*of_generator)  # type: ignore[method-assign]
    learner.sends["a"] = lambda: fail(of_send)
    sync = make_sync(bad, good, timeout_s=0.2, learner=learner)
    report = await publish(sync, 1)
    assert list(report.failed) == [bad.number]
    assert reason in report.failed[bad.number]
    assert await sync.versions() == {"b": 1}
    assert learner.of("drop") == [("drop", "a")]


@pytest.mark.parametrize("generator_fails_first", [True, False])
async def test_the_learners_death_is_no_generators_fault(generator_fails_first: bool) -> None:
    """Its connections close before Ray tells of its death, so Generators fail as well."""
    learner = FakeLearner()
    closed = WireError("Connection closed by peer")
    generators = [FakeGenerator(name, fails="stage", error=closed) for name in "ab"]
    if generator_fails_first:
        learner.sends = dict.fromkeys("ab", asyncio.Event().wait)
    else:
        learner.sends = {name: lambda: fail(ActorDied("learner", "killed")) for name in "ab"}
    publishing = asyncio.create_task(publish(make_sync(*generators, learner=learner), 1))
    while len(learner.of("send")) < 2:
        await asyncio.sleep(0)
    learner.is_dead = True
    with pytest.raises(ActorDied, match="learner died"):
        await publishing


async def test_the_learners_death_while_a_replacement_joins_is_not_the_replacements() -> None:
    learner = FakeLearner()
    sync = await without_one(learner)
    learner.is_dead = True
    with pytest.raises(ActorDied, match="learner died"):
        await admit(sync, FakeGenerator("a"))


async def test_a_wire_that_cannot_be_joined_is_the_generators_fault_and_is_tried_again() -> None:
    learner, generator = FakeLearner(), FakeGenerator("a")
    generator.join = AsyncMock(side_effect=WireError("no store"))  # type: ignore[method-assign]
    sync = make_sync(generator, FakeGenerator("b"), learner=learner)
    assert "a failed in `stage`: no store" in (await publish(sync, 1)).failed[generator.number]
    with pytest.raises(WeightSyncError, match="no store"):
        await admit(sync, generator)
    assert await admit(sync, FakeGenerator("a")) == 1


@pytest.mark.slow
def test_a_death_that_another_actor_reports_keeps_its_name() -> None:
    """Ray sends an actor's error as a pickle; without its own form ActorDied came as something else."""
    for error in (ActorDied("learner", "killed"), OutOfDeviceMemory("learner", "CUDA", 4096)):
        there = pickle.loads(pickle.dumps(error))
        assert (type(there), str(there), vars(there)) == (type(error), str(error), vars(error))
