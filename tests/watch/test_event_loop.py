"""The event loop with many calls: how late it is, calls that leave room for others, and changes to wait for."""

import asyncio
import time
from collections.abc import Callable
from types import ModuleType

import pytest

from grpo_ray.watch.clock import VirtualClock
from grpo_ray.watch.event_loop import PER_TURN, Changes, FanOut, LoopLag, gathered


def test_the_lag_is_the_delay_of_what_is_due() -> None:
    """Work that blocks for 0.7 s from 0.8 s on: of the timers at 0.25, 0.5, 0.75 and 1.0 s the last is late."""
    clock = VirtualClock()

    async def main() -> list[dict[str, float]]:
        lag, loop = LoopLag(), asyncio.get_running_loop()
        found = [lag.take()]
        lag.start()

        def block() -> None:
            clock.now += 0.7

        loop.call_at(0.8, block)
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
    turns, begun, running = 0, [], 0
    most = 0

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

    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(meter.make_task)
        own = asyncio.ensure_future(part())  # the controller's
        assert await asyncio.ensure_future(meter.metered("generator-3", call())) == "done"
        await own

    async def counted() -> str:
        burn(0.03)
        return await meter.metered("generator-3", call())

    async def through_a_client() -> None:
        asyncio.get_running_loop().set_task_factory(meter.make_task)
        assert await meter.metered("client", counted()) == "done"

    new_meter = profiling_script("benchmarks.cpu_meter").CpuMeter
    meter = new_meter()
    VirtualClock().run(main())
    assert meter.seconds.keys() == {"generator"}
    assert meter.seconds["generator"] == pytest.approx(0.1, abs=0.015)
    meter = new_meter()
    VirtualClock().run(through_a_client())
    assert meter.seconds == pytest.approx({"generator": 0.1, "client": 0.03}, abs=0.015)


async def test_a_change_is_not_missed_by_a_wait_that_has_not_begun() -> None:
    changes = Changes()
    waiting = asyncio.ensure_future(changes.next())
    changes.announce()  # the task begins only now
    await asyncio.wait_for(waiting, 60)
