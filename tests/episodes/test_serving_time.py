"""The clock of episodes: it stands still while no Generator serves."""

import asyncio

import pytest
from turn_clients import SETTINGS, FakeGenerator, at_once, never

from grpo_ray.episodes.turn_router import ServingTime, TurnRouter


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_only_the_time_of_serving_counts() -> None:
    clock = Clock()
    served = ServingTime(now=clock)
    seconds = []
    for is_serving, passed in ((True, 1.0), (False, 10.0), (False, 10.0), (True, 2.0), (True, 4.0)):
        served.set(is_serving)
        clock.now += passed
        seconds.append(served.seconds)
    assert seconds == [1.0, 1.0, 1.0, 3.0, 7.0]


def test_work_that_ends_while_no_generator_serves_is_done_at_once() -> None:
    async def run() -> bool:
        served, loop = ServingTime(is_serving=False), asyncio.get_running_loop()
        work = loop.create_future()
        loop.call_later(0.05, work.set_result, 1)
        async with asyncio.timeout(120):
            return await served.wait(work, 60.0)

    assert asyncio.run(run())


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_work_beyond_its_limit_is_cancelled_and_so_is_that_of_a_caller(is_cancelled: bool) -> None:
    work: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(ServingTime().within(9.0 if is_cancelled else 0.05, work))
    await asyncio.sleep(0.01)
    if is_cancelled:
        waiting.cancel()
    (error,) = await asyncio.gather(waiting, return_exceptions=True)
    assert isinstance(error, asyncio.CancelledError if is_cancelled else TimeoutError)
    assert work.cancelled()


async def test_the_clock_of_a_router_runs_while_it_has_generators() -> None:
    router, running = TurnRouter("environment-0", 30.0), []

    async def look() -> None:
        before = router.served.seconds
        await asyncio.sleep(0.02)
        running.append(router.served.seconds > before)

    await look()
    dying = FakeGenerator("generator-0", never)
    await router.serve({0: dying})
    await look()
    turn = asyncio.ensure_future(router.sample((1,), SETTINGS, None))
    await asyncio.sleep(0.01)
    dying.die()
    await router.failures(0)
    await look()
    await router.serve({1: FakeGenerator("generator-0", at_once)})
    await turn
    await look()
    assert running == [False, True, False, True]
