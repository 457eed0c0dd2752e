"""The event loop: how late it is, calls that are open or leave room for others; and the clock of stages."""

import asyncio
import itertools
import threading
import time
from collections.abc import Callable
from types import ModuleType

import pytest
from builders import Time

from grpo_ray.watch import stage_clock
from grpo_ray.watch.clock import VirtualClock
from grpo_ray.watch.event_loop import PER_TURN, Changes, FanOut, LoopLag, gathered
from grpo_ray.watch.open_calls import OpenCalls
from grpo_ray.watch.restarts import BudgetUsedUp, RestartBudget
from grpo_ray.watch.stage_clock import StageClock


def test_the_lag_is_the_delay_of_what_is_due() -> None:
    """Work that blocks for 0.7 s from 0.8 s on: of the timers at 0.25, 0.5, 0.75 and 1.0 s the last is late."""
    clock = VirtualClock()

    async def main() -> list[dict[str, float]]:
        lag, loop = LoopLag(), asyncio.get_running_loop()
        found = [lag.take()]
        lag.start()
        loop.call_at(0.8, setattr, clock, "now", 1.5)
        await asyncio.sleep(0.78)
        found.append(lag.take())
        await asyncio.sleep(0.9)
        found.append(lag.take())
        return found

    nothing, on_time, late = clock.run(main())
    assert nothing == {}
    assert on_time == {"perf/loop_lag_s": pytest.approx(0.0, abs=1e-9)}
    assert late == {"perf/loop_lag_s": pytest.approx(0.5)}


@pytest.mark.virtual_time
async def test_calls_begin_a_few_per_turn_and_all_run_at_the_same_time() -> None:
    turns, begun, running, most = 0, [], 0, 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def call(number: int) -> int:
        nonlocal running, most
        begun.append(turns)
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.5 if number == 5 else 1.0)
        running -= 1
        if number == 5:
            raise ValueError("five")
        return number

    counting = asyncio.ensure_future(count_turns())
    work = asyncio.ensure_future(gathered(call(number) for number in range(4 * PER_TURN)))
    await asyncio.sleep(0)
    while running < 4 * PER_TURN:
        await asyncio.sleep(0)
    counting.cancel()
    with pytest.raises(ValueError, match="five"):
        await work
    assert max(begun.count(turn) for turn in begun) <= PER_TURN
    assert most == 4 * PER_TURN
    assert running == 0  # the error is raised once all have ended
    assert await gathered(map(call, (3, 1, 4))) == [3, 1, 4]


@pytest.mark.virtual_time
async def test_calls_that_are_cancelled_begin_no_more() -> None:
    begun, ended = [], []

    async def call(number: int) -> None:
        begun.append(number)
        try:
            await asyncio.sleep(1.0)
        finally:
            ended.append(number)

    work = asyncio.ensure_future(gathered(call(number) for number in range(1000)))
    for _ in range(5):
        await asyncio.sleep(0)
    work.cancel()
    await asyncio.wait({work})
    await asyncio.sleep(0)
    assert work.cancelled()
    assert 0 < len(begun) < 1000
    assert ended == begun


def test_tasks_that_wake_together_go_on_a_few_per_turn_in_their_order() -> None:
    went_on: list[int] = []
    per_turn: list[int] = []

    async def main() -> None:
        fan_out = FanOut()

        async def send(number: int) -> None:
            await fan_out.turn()
            went_on.append(number)

        tasks = [asyncio.create_task(send(number)) for number in range(3 * PER_TURN)]
        await asyncio.sleep(0)
        tasks[5].cancel()
        while len(went_on) < 3 * PER_TURN - 1:
            before = len(went_on)
            await asyncio.sleep(0)
            per_turn.append(len(went_on) - before)
        await send(-1)  # and the next one after a pause

    asyncio.run(asyncio.wait_for(main(), 120))
    assert max(per_turn) <= PER_TURN
    assert went_on == [n for n in range(3 * PER_TURN) if n != 5] + [-1]


@pytest.mark.slow
def test_an_actors_cpu_time_is_that_of_its_calls_and_of_the_tasks_that_they_create(
    profiling_script: Callable[[str], ModuleType],
) -> None:
    def burn(seconds: float) -> None:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    async def part() -> None:
        burn(0.02)
        await asyncio.sleep(1.0)
        burn(0.02)

    async def call() -> str:
        burn(0.02)
        await asyncio.gather(part(), part())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await asyncio.sleep(5.0)
        return "done"

    async def counted() -> str:
        burn(0.03)
        return await meter.metered("generator-3", call())

    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(meter.make_task)
        own = asyncio.ensure_future(part())  # the controller's
        assert await asyncio.ensure_future(meter.metered("client", counted())) == "done"
        await own

    meter = profiling_script("benchmarks.scale").CpuMeter()
    VirtualClock().run(main())
    assert meter.seconds == pytest.approx({"generator": 0.1, "client": 0.03}, abs=0.015)


async def test_a_change_is_not_missed_by_a_wait_that_has_not_begun() -> None:
    changes = Changes()
    waiting = asyncio.ensure_future(changes.next())
    changes.announce()  # the task begins only now
    await asyncio.wait_for(waiting, 60)


def test_every_answer_is_progress_and_an_error_is_none() -> None:
    clock = Time()
    calls = OpenCalls(clock)
    clock.seconds += 7
    assert calls.quiet_s == 7
    with calls.call("learner", "trains version 1"):
        clock.seconds += 5
        assert calls.quiet_s == 12  # a new call is no progress
    assert calls.quiet_s == 0
    clock.seconds += 3
    calls.progress()
    assert calls.quiet_s == 0
    clock.seconds += 5
    with pytest.raises(ZeroDivisionError), calls.call("learner", "trains version 1"):
        1 // 0  # noqa: B018
    assert calls.quiet_s == 5
    assert calls.lines() == []
    clock.seconds += 100
    assert calls.stuck(1) == []


def test_the_oldest_call_of_each_actor_is_shown_and_makes_it_stuck() -> None:
    clock = Time()
    calls = OpenCalls(clock)
    assert calls.lines() == []
    with calls.call("scorer", "scores group 1"), calls.call("buffer", "waits", is_waiting=True):
        clock.seconds += 6
        with (
            calls.call("generator-0", "samples group 2"),
            calls.call("scorer", "scores group 3"),
            calls.call("scorer", "scores group 4"),
        ):
            clock.seconds += 4
            assert calls.lines() == [
                "buffer: waits for 10 s",
                "generator-0: samples group 2 for 4 s",
                "scorer: scores group 1 for 10 s (and 2 more calls)",
            ]
            assert calls.stuck(11) == []
            assert calls.stuck(10) == ["scorer"]  # not the buffer, which waits for other actors
            assert calls.stuck(4.5) == ["scorer"]
            assert calls.stuck(4) == ["generator-0", "scorer"]
        assert calls.stuck(10) == ["scorer"]
    assert calls.stuck(0) == []


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        ([0.0] * 3, [2, 4, 8]),  # an actor that dies again counts again, however soon
        ([10.0 * n for n in range(8)], [2, 4, 8, 16, 32, 60, 60, 60]),
        ([0.0, 599.9], [2, 4]),  # time.monotonic() starts at 0 when the machine boots
        ([0.0, 600.0], [2, 2]),
        ([0.0, 500.0, 1000.0, 1500.0, 2100.0, 2200.0], [2, 4, 8, 16, 2, 4]),  # counted from the last death
    ],
)
def test_a_pause_doubles_up_to_a_minute_until_none_dies_for_ten(at: list[float], expected: list[float]) -> None:
    assert pauses(at) == expected


def pauses(at: list[float], max_restarts: int = 100) -> list[float]:
    """Return the pause before each restart, for deaths at these seconds."""
    times = iter(at)
    budget = RestartBudget("recovery.max_restarts", max_restarts, 2.0, clock=lambda: next(times))
    return [budget.spend("scorer", "it died") for _ in at]


def test_used_up_budget_shows_the_first_error_and_not_its_consequences() -> None:
    clock = itertools.count(step=1000)  # every restart counts, even in a new series
    budget = RestartBudget("recovery.max_restarts", 2, 1.0, clock=lambda: float(next(clock)))
    budget.spend("generator-0", "generator-0 died: out of memory")
    budget.spend("scorer", "scorer died: killed")
    with pytest.raises(BudgetUsedUp) as caught:
        budget.spend("generator-1", "generator-1 died: killed")
    assert str(caught.value) == (
        "recovery.max_restarts: 2 restarts within an hour are used up. "
        "The first error was: generator-0 died: out of memory"
    )
    with pytest.raises(BudgetUsedUp, match=r"0 restores within an hour .* The first error was: scorer died"):
        RestartBudget("recovery.max_restores", 0, 1.0).spend("scorer", "scorer died")


def test_budget_refills_after_an_hour() -> None:
    """One death per day never ends a run, and neither do `max_per_hour` deaths per hour."""
    pauses([86_400.0 * day for day in range(400)], max_restarts=1)
    pauses([1800.0 * n for n in range(1000)], max_restarts=2)
    with pytest.raises(BudgetUsedUp):
        pauses([1799.0 * n for n in range(1000)], max_restarts=2)


def test_different_actors_that_die_at_about_the_same_time_count_once() -> None:
    """One hiccup of the network makes all 64 Generators miss the same sync."""
    now = [0.0]
    budget = RestartBudget("recovery.max_restarts", 2, 1.0, clock=lambda: now[0])
    for now[0] in (0.0, 1000.0):
        assert {budget.spend(f"generator-{i}", "missed the sync") for i in range(64)} == {1.0}
    now[0] = 1000.0 + 29.9
    assert budget.spend("scorer", "also of that cause") == 1.0
    now[0] = 1000.0 + 30.1
    with pytest.raises(BudgetUsedUp):
        budget.spend("generator-99", "another cause")


# ---- the stage clock counts every second for exactly one stage ----


def make(*stages: str) -> tuple[StageClock, Time]:
    time = Time(100.0)
    return StageClock(stages, "wait", time), time


def test_overlapping_stages_count_for_the_first_in_the_list_up_to_each_reading() -> None:
    clock, time = make("load", "generate")
    time.seconds += 8
    with clock.stage("generate") as whole:
        time.seconds += 1
        with clock.stage("generate"), clock.stage("load") as part:
            time.seconds += 2
        time.seconds += 4
        times = clock.take()
        assert (times.seconds, times.wall_s) == ({"load": 2, "generate": 5, "wait": 8}, 15)
        time.seconds += 16
    assert (whole.seconds, part.seconds) == (23, 2)  # of the blocks, whichever stage counted
    with pytest.raises(ZeroDivisionError), clock.stage("load"):
        time.seconds += 1 // 0
    time.seconds += 32
    assert clock.take().seconds == {"load": 0, "generate": 16, "wait": 32}


def test_turns_are_consecutive_and_have_labels() -> None:
    clock, time = make("load", "generate")
    time.seconds += 1
    with clock.stage("generate", "version 1"):
        time.seconds += 2
        with clock.stage("load", "version 2"):
            time.seconds += 4
        with clock.stage("generate", "version 2"):
            time.seconds += 8
            first = clock.take().turns
            time.seconds += 16
    turns = [*first, *clock.take().turns]
    told = [(turn.name, round(turn.end - turn.start, 3), turn.label) for turn in turns]
    assert told == [
        ("wait", 1, ""),
        ("generate", 2, "version 1"),
        ("load", 4, "version 2"),
        ("generate", 8, "version 2"),
        ("generate", 16, "version 2"),  # split by the reading
    ]
    assert [turn.start for turn in turns[1:]] == [turn.end for turn in turns[:-1]]


def test_spans_are_whole_and_may_overlap() -> None:
    clock, time = make("generate")
    with clock.span("rollout", "group 1") as duration:
        time.seconds += 3
        with clock.span("rollout", "group 2"):
            time.seconds += 1
        (inner,) = clock.take().spans
    (outer,) = clock.take().spans
    assert (inner.label, outer.label) == ("group 2", "group 1")
    assert outer.end - outer.start == pytest.approx(4) == duration.seconds
    assert outer.start < inner.start


def test_the_callback_gets_every_turn() -> None:
    heard: list[str] = []
    clock = StageClock(("evaluate", "train"), "idle", on_turn=heard.append)
    with clock.stage("train"), clock.stage("evaluate"), clock.stage("train"):
        pass
    assert heard == ["train", "evaluate", "train", "idle"]


def test_unread_records_do_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_clock, "MAX_SPANS", 7)
    clock, time = make("a")
    for _ in range(12):
        with clock.stage("a"), clock.span("rollout"):
            time.seconds += 1
    times = clock.take()
    assert len(times.turns) == len(times.spans) == 7
    assert times.seconds["a"] == 12


def test_threads_count_each_second_once() -> None:
    """One thread trains, others write at the same time, and one reads."""
    clock = StageClock(("train", "write"), "wait")

    def write() -> None:
        for _ in range(200):
            with clock.stage("write"), clock.span("file"):
                pass

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    readings = []
    for _ in range(200):
        with clock.stage("train"):
            readings.append(clock.take())
    for thread in threads:
        thread.join()
    readings.append(clock.take())
    for times in readings:
        assert sum(times.seconds.values()) == pytest.approx(times.wall_s)
        assert sum(turn.end - turn.start for turn in times.turns) == pytest.approx(times.wall_s, abs=1e-3)
    assert sum(len(times.spans) for times in readings) == 4 * 200
