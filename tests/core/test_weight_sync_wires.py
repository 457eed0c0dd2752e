"""WeightSync with wires, over fakes of both ends: the order of calls, and the end that is to blame."""

import asyncio
import pickle
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from test_weight_sync import FakeGenerator, admit, fakes, publish

from grpo_ray.core.sync import WeightSync, WeightSyncError
from grpo_ray.errors import ActorDied, OutOfDeviceMemory
from grpo_ray.transfer import wires
from grpo_ray.transfer.messages import Meeting, WireError
from grpo_ray.transfer.wires import Wires

pytestmark = pytest.mark.virtual_time


class FakeLearner:
    """The Learner's end; `sends[name]` is called in place of a transfer."""

    name = "learner"

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.sends: dict[str, Callable[[], Awaitable[None]]] = {}
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


class Joining(FakeGenerator):
    def __init__(self, name: str, *args: Any, **options: Any) -> None:
        super().__init__(name, *args, **options)
        self.joined: list[str] = []

    async def join(self, meeting: Meeting) -> None:
        self.joined.append(meeting.key)


def make_sync(
    learner: FakeLearner, *generators: Joining, call: str = "stage", timeout_s: float = 5.0
) -> WeightSync:
    return WeightSync(fakes(generators), timeout_s, 0, Wires(learner, call))


async def fail(error: Exception, after_s: float = 0.0) -> None:
    await asyncio.sleep(after_s)
    raise error


async def hang() -> None:
    await asyncio.Event().wait()


async def test_each_generator_joins_once_and_is_sent_every_version() -> None:
    learner, one, two = FakeLearner(), Joining("a"), Joining("b")
    sync = make_sync(learner, one, two)
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
    learner, generator = FakeLearner(), Joining("a")
    generator.gates[call] = asyncio.Event()
    publishing = asyncio.create_task(publish(make_sync(learner, generator, call=call), 1))
    await asyncio.sleep(0.05)
    assert generator.asked[-1] == call
    assert learner.of("send") == [("send", "a", 1)]
    before = generator.log.copy()
    generator.gates[call].set()
    await publishing
    assert before == generator.log[: len(before)]


async def test_a_replacement_joins_and_is_sent_the_published_version() -> None:
    learner = FakeLearner()
    dead = Joining("a")
    sync = make_sync(learner, dead, Joining("b"))
    await publish(sync, 1)
    await sync.retire(dead.number)
    fresh = Joining("a")
    assert await admit(sync, fresh) == 1
    assert fresh.joined == ["a/3"]
    assert learner.of("send")[-1] == ("send", "a", 1)
    assert (await publish(sync, 2)).failed == {}
    assert len(fresh.joined) == 1


@pytest.mark.parametrize("send_fails_first", [True, False])
async def test_a_generator_that_fails_a_transfer_is_retired_alone_with_its_own_error(
    send_fails_first: bool,
) -> None:
    learner = FakeLearner()
    bad, good = Joining("a", fails="stage", error=ActorDied("a", "killed")), Joining("b")
    if send_fails_first:
        bad.fails, bad.hangs = "", "stage"

        async def late() -> None:
            await fail(ActorDied("a", "killed"), 0.05)

        bad.stage_weights = lambda snapshot: late()  # type: ignore[method-assign]
        learner.sends["a"] = lambda: fail(WireError("the other end is gone"))
    else:
        learner.sends["a"] = hang
    sync = make_sync(learner, bad, good)
    report = await publish(sync, 1)
    assert list(report.failed) == [bad.number]
    assert "a failed in `stage`: a died: killed" in report.failed[bad.number]
    assert await sync.versions() == {"b": 1}
    assert learner.of("drop") == [("drop", "a")]


@pytest.mark.slow
async def test_a_transfer_that_hangs_is_dropped_after_the_time_limit() -> None:
    learner, bad, good = FakeLearner(), Joining("a", hangs="stage"), Joining("b")
    learner.sends["a"] = hang
    sync = make_sync(learner, bad, good, timeout_s=0.2)
    report = await publish(sync, 1)
    assert "a did not finish `stage` within 0.2 s" in report.failed[bad.number]
    assert learner.of("drop") == [("drop", "a")]
    assert await sync.versions() == {"b": 1}


async def test_a_send_that_fails_excludes_its_generator_even_if_that_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wires, "GRACE_S", 0.05)
    learner, bad = FakeLearner(), Joining("a", hangs="stage")
    learner.sends["a"] = lambda: fail(WireError("gone or silent"))
    report = await publish(make_sync(learner, bad, Joining("b")), 1)
    assert "gone or silent" in report.failed[bad.number]


@pytest.mark.parametrize("generator_fails_first", [True, False])
async def test_the_learners_death_is_no_generators_fault(generator_fails_first: bool) -> None:
    """Its connections close before Ray tells of its death, so Generators fail as well."""
    learner = FakeLearner()
    closed = WireError("Connection closed by peer")
    generators = [Joining(name, fails="stage", error=closed) for name in "ab"]
    if generator_fails_first:
        learner.sends = dict.fromkeys("ab", hang)
    else:
        learner.sends = {name: lambda: fail(ActorDied("learner", "killed")) for name in "ab"}
    sync = make_sync(learner, *generators)
    publishing = asyncio.create_task(publish(sync, 1))
    while len(learner.of("send")) < 2:
        await asyncio.sleep(0)
    learner.is_dead = True
    with pytest.raises(ActorDied, match="learner died"):
        await publishing


async def test_the_learners_death_while_a_replacement_joins_is_not_the_replacements() -> None:
    learner = FakeLearner()
    dead = Joining("a")
    sync = make_sync(learner, dead, Joining("b"))
    await publish(sync, 1)
    await sync.retire(dead.number)
    learner.is_dead = True
    with pytest.raises(ActorDied, match="learner died"):
        await admit(sync, Joining("a"))


async def test_a_wire_that_cannot_be_joined_is_the_generators_fault_and_is_tried_again() -> None:
    learner, generator = FakeLearner(), Joining("a")

    async def refuse(meeting: Meeting) -> None:
        raise WireError("no store")

    generator.join = refuse  # type: ignore[method-assign]
    sync = make_sync(learner, generator, Joining("b"))
    report = await publish(sync, 1)
    assert "a failed in `stage`: no store" in report.failed[generator.number]
    with pytest.raises(WeightSyncError, match="no store"):
        await admit(sync, generator)
    fresh = Joining("a")
    assert await admit(sync, fresh) == 1


@pytest.mark.slow
def test_a_death_that_another_actor_reports_keeps_its_name() -> None:
    """Ray sends an actor's error as a pickle; without its own form ActorDied came as something else."""
    for error in (ActorDied("learner", "killed"), OutOfDeviceMemory("learner", "CUDA", 4096)):
        there = pickle.loads(pickle.dumps(error))
        assert (type(there), str(there), vars(there)) == (type(error), str(error), vars(error))
