"""WeightSync as a plain object: the transaction, Generators that fail it, and their replacements."""

import asyncio
import itertools
from collections.abc import Awaitable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_ray.actors.staleness import Admission
from grpo_ray.actors.weight_sync import PHASES, WeightSync, WeightSyncError, admission_of
from grpo_ray.config import Config
from grpo_ray.errors import ActorDied, DataLost
from grpo_ray.tools.simulation.virtual_time import VirtualClock
from grpo_ray.types import Admitted, SyncReport

DONE = [event for phase in PHASES for event in (phase, f"{phase} done")]


class FakeGenerator:
    """A Generator that logs its calls, and hangs, fails or waits at a gate in the given phases."""

    def __init__(
        self,
        name: str,
        log: list[tuple[str, str]] | None = None,
        hangs: str = "",
        fails: str = "",
        error: Exception | None = None,
    ) -> None:
        self.name, self.log, self.hangs, self.fails = name, [] if log is None else log, hangs, fails
        self.error = error or RuntimeError("out of memory")
        self.loaded: list[object] = []
        self.gates: dict[str, asyncio.Event] = {}

    @property
    def asked(self) -> list[str]:
        return [event for event, name in self.log if name == self.name]

    async def _phase(self, phase: str) -> None:
        self.log.append((phase, self.name))
        if phase == self.fails:
            raise self.error
        if phase == self.hangs:
            await asyncio.Event().wait()
        if phase in self.gates:
            await self.gates[phase].wait()
        await asyncio.sleep(0.001 if self.name == "a" else 0.003)
        self.log.append((f"{phase} done", self.name))

    def stage_weights(self, snapshot: object) -> Awaitable[None]:
        self.loaded.append(snapshot)
        return self._phase("stage")

    def pause(self) -> Awaitable[None]:
        return self._phase("pause")

    def load_weights(self) -> Awaitable[None]:
        return self._phase("load")

    def finish_weights(self) -> Awaitable[None]:
        return self._phase("finish")

    async def resume(self) -> float:
        await self._phase("resume")
        return 0.25 if self.name == "a" else 0.5


def make_sync(
    *generators: FakeGenerator, timeout_s: float = 5.0, version: int = 0, extra_slots: int = 0
) -> WeightSync:
    admission = Admission(max_lag=1, groups_per_step=4, num_steps=1000, extra_slots=extra_slots)
    return WeightSync(fakes(generators), admission, timeout_s, version)


def fakes(generators: Iterable[object]) -> Any:
    """Return the fakes, typed as the clients that they stand in for."""
    return tuple(generators)


async def admitted(sync: WeightSync, version: int, num_groups: int) -> tuple[int, int]:
    """Wait until more is admitted than is known; return the version and the number of groups."""
    answer = await sync.admission(Admitted(version, num_groups))
    return answer.version, answer.num_groups


async def publish(sync: WeightSync, version: int) -> SyncReport:
    return await asyncio.wait_for(sync.publish(version, fakes([f"weights {version}"])), 120)


async def admit(sync: WeightSync, generator: FakeGenerator) -> int:
    return await asyncio.wait_for(sync.admit(fakes([generator])[0]), 120)


async def nothing_more_is_admitted(sync: WeightSync, version: int, limit: int) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(admitted(sync, version, limit), 0.02)


# ---- the transaction ----


def test_no_generator_pauses_before_all_have_the_weights_and_then_none_waits_for_another() -> None:
    log: list[tuple[str, str]] = []
    fast, slow = FakeGenerator("a", log), FakeGenerator("b", log)
    sync = make_sync(fast, slow, timeout_s=600)

    async def run() -> SyncReport:
        slow.gates = {phase: asyncio.Event() for phase in ("stage", "load")}
        publishing = asyncio.ensure_future(publish(sync, 1))
        await until(lambda: ("stage done", "a") in log and ("stage", "b") in log)
        await asyncio.sleep(0.01)
        assert ("pause", "a") not in log
        slow.gates["stage"].set()
        await until(lambda: ("resume done", "a") in log)
        assert ("load done", "b") not in log
        slow.gates["load"].set()
        return await publishing

    report = asyncio.run(run())
    assert fast.asked == slow.asked == DONE
    assert [generator.loaded for generator in (fast, slow)] == [["weights 1"]] * 2
    assert (report.version, report.failed) == (1, {})
    assert report.metrics.pop("timing/weight_sync/paused_s") == 0.5  # as the slower Generator says
    assert set(report.metrics) == {f"timing/weight_sync/{phase}_s" for phase in PHASES}
    assert all(seconds >= 0.002 for seconds in report.metrics.values())  # those of the slower Generator
    assert VirtualClock().run(sync.versions()) == {"a": 1, "b": 1}


@pytest.mark.parametrize(("start", "version"), [(0, 0), (0, 2), (5, 1), (5, 5), (5, 7)])
def test_versions_are_consecutive(start: int, version: int) -> None:
    generator = FakeGenerator("a")
    with pytest.raises(ValueError, match=f"version {version} cannot follow {start}"):
        VirtualClock().run(publish(make_sync(generator, version=start), version))
    assert generator.log == []


def test_other_weights_than_the_generators_started_with_are_sent_as_the_same_version() -> None:
    """An adapter's Generators start with its base; one that is restarted gets the adapted weights as well."""

    async def run() -> None:
        generator, fresh = FakeGenerator("a"), FakeGenerator("a")
        sync = make_sync(generator, version=5)
        report = await sync.publish(5, fakes(["adapted"]), is_initial=True)
        assert (report.version, generator.loaded) == (5, ["adapted"])
        await sync.retire("a")
        assert await sync.admit(fresh) == 5
        assert fresh.loaded == ["adapted"]
        with pytest.raises(ValueError, match="version 6 cannot follow 5"):
            await sync.publish(6, fakes(["weights 6"]), is_initial=True)

    VirtualClock().run(run())


def test_admission_waits_until_every_generator_runs_the_version() -> None:
    async def run() -> None:
        slow = FakeGenerator("slow")
        slow.gates["resume"] = asyncio.Event()
        sync = make_sync(FakeGenerator("a"), slow)
        assert await admitted(sync, -1, 0) == await admitted(sync, 0, 7) == (0, 8)
        waiting = asyncio.create_task(admitted(sync, 0, 8))
        publishing = asyncio.create_task(publish(sync, 1))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        slow.gates["resume"].set()
        assert await asyncio.wait_for(waiting, 120) == (1, 12)
        await publishing

    VirtualClock().run(run())


def test_admission_starts_from_the_version_of_the_run() -> None:
    async def run() -> None:
        sync = make_sync(FakeGenerator("a"), version=5)
        assert await sync.versions() == {"a": 5}
        assert await admitted(sync, -1, 0) == (5, 28)  # (5 + 1 + a lag of 1) * 4 groups
        await nothing_more_is_admitted(sync, 5, 28)
        await publish(sync, 6)
        assert await admitted(sync, 5, 28) == (6, 32)

    VirtualClock().run(run())


@pytest.mark.parametrize("extra_slots", [3, 0, -2])
def test_added_slots_admit_more_groups_at_once(extra_slots: int) -> None:
    async def run() -> None:
        sync = make_sync(FakeGenerator("a"), extra_slots=extra_slots)
        limit = 8 + extra_slots
        assert await admitted(sync, -1, 0) == (0, limit)
        waiting = asyncio.create_task(admitted(sync, 0, limit))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        await sync.add_slots(2)
        assert await asyncio.wait_for(waiting, 120) == (0, limit + 2)
        await nothing_more_is_admitted(sync, 0, limit + 2)
        await publish(sync, 1)
        assert await admitted(sync, 0, limit + 2) == (1, limit + 6)

    VirtualClock().run(run())


def test_later_version_is_reported_even_if_the_limit_is_known() -> None:
    """Groups that were cut off are sampled again at every version, with or without new ones."""

    async def run() -> None:
        sync = make_sync(FakeGenerator("a"))
        waiting = asyncio.create_task(admitted(sync, 0, 100))
        await publish(sync, 1)
        assert await asyncio.wait_for(waiting, 120) == (1, 12)

    VirtualClock().run(run())


def test_admission_of_a_configuration(tiny_config: Config) -> None:
    """A batch of 3, of which 1 is replayed: 2 fresh groups per step."""
    data = tiny_config.model_dump()
    data["weight_sync"] |= {"max_lag": 3}
    data["buffer"] |= {"lookahead": 4, "replay": {"frac": 0.34}}
    num_steps = data["algorithm"]["num_steps"]
    # The look-ahead of 4 makes a group ceil(3 / 2) = 2 steps late: admission has a lag of 1.
    assert admission_of(Config.model_validate(data)) == Admission(1, 2, num_steps)
    data["buffer"]["lookahead"] = 1
    assert admission_of(Config.model_validate(data)) == Admission(3, 2, num_steps)


def test_changes_are_sent_to_serving_generators_and_the_whole_to_a_replacement() -> None:
    async def run() -> None:
        generator, fresh = FakeGenerator("a"), FakeGenerator("b")
        sync = make_sync(generator, FakeGenerator("b", fails="load"))
        await sync.publish(1, fakes(["whole 1"]))
        await sync.publish(2, fakes(["whole 2", "changes 2"]))
        await admit(sync, fresh)
        await sync.publish(3, fakes(["whole 3", "changes 3"]))
        await sync.publish(4, fakes(["whole 4"]))
        assert generator.loaded == ["whole 1", "changes 2", "changes 3", "whole 4"]
        assert fresh.loaded == ["whole 2", "changes 3", "whole 4"]

    VirtualClock().run(run())


# ---- Generators that fail the sync ----


def reason(name: str, phase: str, hangs: bool) -> str:
    if hangs:
        how = f"did not finish phase `{phase}` within 0.05 s (weight_sync.phase_timeout_s)"
    else:
        how = f"failed in phase `{phase}`: out of memory"
    return f"weight sync: {name} {how}"


@pytest.mark.parametrize("hangs", [True, False])
@pytest.mark.parametrize("phase", PHASES)
def test_generator_that_fails_the_sync_is_named_and_excluded_and_the_others_continue(
    phase: str, hangs: bool
) -> None:
    async def run() -> None:
        good, bad = FakeGenerator("a"), FakeGenerator("b", **{"hangs" if hangs else "fails": phase})
        sync = make_sync(good, bad, timeout_s=0.05)
        report = await publish(sync, 1)
        assert (report.version, report.failed) == (1, {"b": reason("b", phase, hangs)})
        assert await sync.stale() == {"b"}
        assert await sync.versions() == {"a": 1}
        assert await admitted(sync, 0, 8) == (1, 12)
        assert good.asked == DONE
        assert bad.asked == DONE[: DONE.index(phase) + 1]  # nothing after the phase that it failed in

        bad.hangs = bad.fails = ""
        before = list(bad.log)
        assert (await publish(sync, 2)).failed == {}
        assert bad.log == before  # excluded until it is admitted
        assert good.loaded == ["weights 1", "weights 2"]
        assert await sync.stale() == {"b"}

    VirtualClock().run(run())


def test_each_failed_generator_is_named_with_its_own_phase() -> None:
    async def run() -> None:
        sync = make_sync(
            FakeGenerator("a", fails="resume"), FakeGenerator("b", hangs="load"),
            FakeGenerator("c", fails="pause", error=ActorDied("c", "killed")), timeout_s=0.05,
        )  # fmt: skip
        assert (await publish(sync, 1)).failed == {
            "a": reason("a", "resume", hangs=False),
            "b": reason("b", "load", hangs=True),
            "c": "weight sync: c failed in phase `pause`: c died: killed",
        }
        assert await sync.stale() == {"a", "b", "c"}

    VirtualClock().run(run())


@pytest.mark.parametrize("phase", PHASES)
def test_version_is_published_even_if_the_only_generator_failed(phase: str) -> None:
    async def run() -> None:
        sync = make_sync(FakeGenerator("a", fails=phase))
        assert list((await publish(sync, 1)).failed) == ["a"]
        assert await sync.versions() == {}
        assert await sync.stale() == {"a"}
        assert await admitted(sync, 0, 8) == (1, 12)
        assert (await publish(sync, 2)).failed == {}  # to no Generator
        fresh = FakeGenerator("a")
        assert await admit(sync, fresh) == 2
        assert fresh.loaded == ["weights 2"]

    VirtualClock().run(run())


def test_generator_retired_during_a_publish_is_excluded_from_it() -> None:
    async def run() -> None:
        good, dead = FakeGenerator("a"), FakeGenerator("b")
        dead.gates["load"] = asyncio.Event()
        sync = make_sync(good, dead)
        publishing = asyncio.create_task(publish(sync, 1))
        await until(lambda: dead.asked == DONE[: DONE.index("load") + 1])
        await sync.retire("b")
        dead.gates["load"].set()
        assert (await publishing).failed == {}
        assert await sync.versions() == {"a": 1}
        assert await sync.stale() == {"b"}
        before = list(dead.log)
        await publish(sync, 2)
        assert dead.log == before

    VirtualClock().run(run())


async def until(condition: object) -> None:
    async with asyncio.timeout(120):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.001)


def test_lost_snapshot_is_raised_and_no_generator_is_blamed() -> None:
    async def run() -> None:
        generators = [FakeGenerator(name, fails="stage", error=DataLost("the node is gone")) for name in "ab"]
        sync = make_sync(*generators)
        with pytest.raises(DataLost, match="the node is gone"):
            await publish(sync, 1)
        assert await sync.stale() == frozenset()
        assert await sync.versions() == {"a": 0, "b": 0}
        await nothing_more_is_admitted(sync, 0, 8)
        assert await admit(sync, FakeGenerator("c")) == 0  # the transaction is over

    VirtualClock().run(run())


# ---- admitting a replacement ----


@pytest.mark.parametrize("start", [0, 5])
def test_admitted_generator_gets_the_published_weights_and_is_in_every_later_sync(start: int) -> None:
    async def run() -> None:
        good, fresh = FakeGenerator("a"), FakeGenerator("b")
        sync = make_sync(good, FakeGenerator("b", fails="load"), version=start)
        await publish(sync, start + 1)
        await publish(sync, start + 2)
        before = list(good.log)
        assert await admit(sync, fresh) == start + 2
        assert fresh.asked == DONE
        assert fresh.loaded == [f"weights {start + 2}"]
        assert good.log == before  # the others keep sampling
        assert await sync.stale() == frozenset()
        assert await sync.versions() == {"a": start + 2, "b": start + 2}
        await publish(sync, start + 3)
        assert fresh.loaded == [f"weights {start + 2}", f"weights {start + 3}"]
        assert await sync.versions() == {"a": start + 3, "b": start + 3}

    VirtualClock().run(run())


@pytest.mark.parametrize("start", [0, 5])
def test_generator_admitted_before_the_first_publish_already_has_the_right_weights(start: int) -> None:
    async def run() -> None:
        fresh = FakeGenerator("b")
        sync = make_sync(FakeGenerator("a"), FakeGenerator("b"), version=start)
        await sync.retire("b")
        assert await sync.versions() == {"a": start}
        assert await admit(sync, fresh) == start
        assert fresh.log == []
        assert await sync.stale() == frozenset()
        assert await sync.versions() == {"a": start, "b": start}
        await publish(sync, start + 1)
        assert fresh.loaded == [f"weights {start + 1}"]

    VirtualClock().run(run())


@pytest.mark.slow
@pytest.mark.parametrize("hangs", [True, False])
@pytest.mark.parametrize("phase", PHASES)
def test_generator_that_cannot_be_admitted_is_named_and_stays_excluded(phase: str, hangs: bool) -> None:
    async def run() -> None:
        sync = make_sync(FakeGenerator("a"), FakeGenerator("b", fails="pause"), timeout_s=0.05)
        await publish(sync, 1)
        bad, good = FakeGenerator("b", **{"hangs" if hangs else "fails": phase}), FakeGenerator("b")
        with pytest.raises(WeightSyncError) as caught:
            await admit(sync, bad)
        assert str(caught.value) == reason("b", phase, hangs)
        assert await sync.stale() == {"b"}
        assert await sync.versions() == {"a": 1}
        before = list(bad.log)
        assert (await publish(sync, 2)).failed == {}
        assert bad.log == before
        assert await admit(sync, good) == 2
        assert good.loaded == ["weights 2"]

    VirtualClock().run(run())


def test_snapshot_lost_while_admitting_is_raised_and_the_generator_stays_excluded() -> None:
    async def run() -> None:
        sync = make_sync(FakeGenerator("a"), FakeGenerator("b", fails="pause"))
        await publish(sync, 1)
        with pytest.raises(DataLost):
            await admit(sync, FakeGenerator("b", fails="stage", error=DataLost("gone")))
        assert await sync.stale() == {"b"}
        assert await sync.versions() == {"a": 1}

    VirtualClock().run(run())


def test_admission_of_a_generator_waits_for_the_current_publish() -> None:
    async def run() -> None:
        good, fresh = FakeGenerator("a"), FakeGenerator("b")
        sync = make_sync(good, FakeGenerator("b", fails="load"))
        await publish(sync, 1)
        good.gates["load"] = asyncio.Event()
        publishing = asyncio.create_task(publish(sync, 2))
        await until(lambda: good.loaded == ["weights 1", "weights 2"])
        admitting = asyncio.create_task(admit(sync, fresh))
        await asyncio.sleep(0.02)
        assert fresh.log == []
        good.gates["load"].set()
        assert await admitting == 2
        await publishing
        assert fresh.loaded == ["weights 2"]
        assert await sync.versions() == {"a": 2, "b": 2}

    VirtualClock().run(run())


def test_publish_waits_for_the_admission_of_a_generator_and_includes_it() -> None:
    async def run() -> None:
        good, fresh = FakeGenerator("a"), FakeGenerator("b")
        sync = make_sync(good, FakeGenerator("b", fails="load"))
        await publish(sync, 1)
        fresh.gates["load"] = asyncio.Event()
        admitting = asyncio.create_task(admit(sync, fresh))
        await until(lambda: fresh.loaded == ["weights 1"])
        publishing = asyncio.create_task(publish(sync, 2))
        await asyncio.sleep(0.02)
        assert good.loaded == ["weights 1"]
        await nothing_more_is_admitted(sync, 1, 12)
        fresh.gates["load"].set()
        assert await admitting == 1
        assert (await publishing).failed == {}
        assert fresh.loaded == ["weights 1", "weights 2"]
        assert await sync.versions() == {"a": 2, "b": 2}

    VirtualClock().run(run())


class ServingGenerator:
    """A Generator that records what it serves; each phase takes the given turns of the event loop."""

    def __init__(self, name: str, turns: "itertools.cycle[int]") -> None:
        self.name, self._turns = name, turns
        self.serves, self._is_paused = "weights 0", False

    async def _take_turns(self) -> None:
        for _ in range(next(self._turns)):
            await asyncio.sleep(0)

    async def pause(self) -> None:
        assert not self._is_paused, "two transactions at once"
        self._is_paused = True
        await self._take_turns()

    async def stage_weights(self, snapshot: str) -> None:
        assert not self._is_paused, "two transactions at once"
        await self._take_turns()
        self._staged = snapshot

    async def load_weights(self) -> None:
        assert self._is_paused
        await self._take_turns()

    async def finish_weights(self) -> None:
        assert self._is_paused
        await self._take_turns()
        self.serves = self._staged

    async def resume(self) -> float:
        assert self._is_paused
        await self._take_turns()
        self._is_paused = False
        return 0.0


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(
    turns=st.lists(st.integers(0, 5), min_size=1, max_size=12),
    pauses=st.lists(st.integers(0, 30), min_size=4, max_size=4),
)
def test_serving_generators_have_the_published_weights_however_deaths_and_publishes_interleave(
    turns: list[int], pauses: list[int]
) -> None:
    async def run() -> None:
        speeds = itertools.cycle(turns)
        serving = {name: ServingGenerator(name, speeds) for name in "abc"}
        sync = WeightSync(fakes(serving.values()), Admission(1, 4, num_steps=1000), phase_timeout_s=60)

        async def replace(name: str, pause: int) -> None:
            for _ in range(pause):
                await asyncio.sleep(0)
            await sync.retire(name)
            fresh = ServingGenerator(name, speeds)
            version = await sync.admit(fakes([fresh])[0])
            serving[name] = fresh
            assert fresh.serves == f"weights {version}"

        async def check() -> None:
            """Check whenever admission opens that every serving Generator runs the published version."""
            for version in range(1, 5):
                published, limit = await admitted(sync, version - 1, (version + 1) * 4)
                assert limit == (published + 2) * 4
                for name, runs in (await sync.versions()).items():
                    assert runs == published
                    assert serving[name].serves >= f"weights {published}"

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(check())
            for name, pause in zip("bcbc", pauses, strict=True):
                tasks.create_task(replace(name, pause))
            for version in range(1, 5):
                assert (await publish(sync, version)).failed == {}
        assert await sync.versions() == dict.fromkeys("abc", 4)
        assert {generator.serves for generator in serving.values()} == {"weights 4"}

    VirtualClock().run(asyncio.wait_for(run(), 120))
