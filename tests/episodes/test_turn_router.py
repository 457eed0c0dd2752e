"""Turns on their way to Generators: batched, routed by their prefix, and kept when a Generator fails."""

import asyncio
import gc
import pickle
from collections.abc import Mapping
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest
from builders import Time, same_groups
from hypothesis import given
from hypothesis import strategies as st
from turn_clients import SETTINGS, FakeGenerator, at_once, completion, never, until

from grpo_ray.engines.base import EngineDied
from grpo_ray.episodes import turn_router
from grpo_ray.episodes.turn_box import FinishedTurns, TurnBox, TurnBoxes
from grpo_ray.episodes.turn_router import SLACK, RoutedSampler, ServingTime, TurnLink, TurnRouter
from grpo_ray.errors import DataLost, TurnUnanswered
from grpo_ray.types import Completion, SamplingSettings

WORKER = "environment-0", "one process"


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), max_size=5))
def test_finished_turns_travel_unchanged(rows: list[list[int]]) -> None:
    completions = {3 * n + 1: completion(*ids, text=f"text {n}", version=n) for n, ids in enumerate(rows)}
    got = pickle.loads(pickle.dumps(FinishedTurns({**completions, 2: EngineDied("gone")})))
    error = got.ends.pop(2)
    assert isinstance(error, EngineDied)
    assert str(error) == "gone"
    assert got.ends.keys() == completions.keys()
    assert same_groups([*got.ends.values()], [*completions.values()])


async def test_a_box_reports_each_turn_once_and_cancelled_ones_never() -> None:
    ends = {n: asyncio.get_running_loop().create_future() for n in range(5)}

    async def sample(token_ids: tuple[int, ...], settings: SamplingSettings) -> Completion:
        return await ends[token_ids[0]]

    box = TurnBox(sample)
    box.begin({10 + n: ((n,), SETTINGS) for n in range(5)}, [])
    await asyncio.sleep(0)
    box.begin({}, [11])
    ends[0].set_result(completion(7))
    ends[2].set_exception(EngineDied("gone"))
    ends[4].set_exception(ValueError("the prompt is too long"))
    await asyncio.sleep(0.01)
    box.begin({}, [14])  # which has failed, and the worker has not asked yet
    first = await box.finished()
    assert {number: type(end) for number, end in first.ends.items()} == {10: Completion, 12: EngineDied}
    waiting = asyncio.ensure_future(box.finished())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    assert ends[1].cancelled()
    ends[3].set_result(completion(8))
    assert list((await waiting).ends) == [13]


async def test_a_box_of_a_dead_process_is_closed_once_its_successor_comes() -> None:
    boxes = TurnBoxes(never)
    old = boxes.of(("environment-0", "first"))
    old.begin({0: ((1,), SETTINGS)}, [])
    other = boxes.of(("environment-1", "its own"))
    await asyncio.sleep(0)
    (task,) = old._running.values()
    new = boxes.of(("environment-0", "second"))
    new.begin({0: ((1,), SETTINGS)}, [])
    await asyncio.wait({task})
    assert task.cancelled()
    assert (await old.finished()).ends == {}  # its call, if there is one, ends too
    for _ in range(2):  # a late call may be executed after its replacement's first, as after a SIGCONT
        with pytest.raises(RuntimeError, match="process of environment-0 has been replaced"):
            boxes.of(("environment-0", "first"))
    (task,) = new._running.values()
    assert not task.cancelling()
    assert boxes.of(("environment-0", "second")) is new is not old
    assert boxes.of(("environment-1", "its own")) is other
    new.close()


async def test_turns_that_come_together_go_out_together() -> None:
    generator = FakeGenerator("generator-0", at_once)
    link = TurnLink(generator, WORKER, 30.0)
    ends = await asyncio.gather(*(link.sample((n,), SETTINGS) for n in range(100)))
    assert [int(end.token_ids[0]) for end in ends] == list(range(100))
    assert generator.calls == [100]
    assert link.num_turns == 0


async def test_no_turn_is_lost_or_mixed_up_when_they_come_and_end_in_any_order() -> None:
    rng = np.random.default_rng(0)

    async def sample(token_ids: tuple[int, ...], settings: SamplingSettings) -> Completion:
        await asyncio.sleep(rng.random() * 0.02)
        return completion(*token_ids)

    link = TurnLink(FakeGenerator("generator-0", sample), WORKER, 30.0)

    async def episode(number: int) -> None:
        for turn in range(5):
            await asyncio.sleep(rng.random() * 0.01)
            assert (await link.sample((number, turn), SETTINGS)).token_ids.tolist() == [number, turn]

    async with asyncio.timeout(120):
        await asyncio.gather(*map(episode, range(50)))
    assert link.num_turns == 0


@pytest.mark.parametrize("is_sent", [False, True])
async def test_a_cancelled_turn_ends_in_the_generator(is_sent: bool) -> None:
    generator = FakeGenerator("generator-0", never)
    link = TurnLink(generator, WORKER, 30.0)
    turn = asyncio.ensure_future(link.sample((1,), SETTINGS))
    await until(lambda: generator.num_running == 1) if is_sent else await asyncio.sleep(0)
    turn.cancel()
    await asyncio.wait({turn})
    assert turn.cancelled()
    await asyncio.sleep(0.05)
    assert (generator.num_running, link.num_turns) == (0, 0)
    assert generator.num_started == generator.num_cancelled


def test_a_link_whose_loop_ends_first_leaves_nothing_unawaited(recwarn: pytest.WarningsRecorder) -> None:
    async def ends_at_once() -> None:
        link = TurnLink(FakeGenerator("generator-0", never), WORKER, 30.0)
        turn = asyncio.ensure_future(link.sample((1,), SETTINGS))
        await asyncio.sleep(0)  # the link has a task, which has not begun
        assert not turn.done()

    gc.collect()  # what other tests have left
    recwarn.clear()
    asyncio.run(ends_at_once())
    gc.collect()
    assert not [w for w in recwarn if "never awaited" in str(w.message)]


async def test_an_error_of_a_call_fails_the_turns_that_wait_for_it_and_no_later_one() -> None:
    class Losing(FakeGenerator):
        num_lost = 0

        async def finished_turns(self, worker: Any) -> FinishedTurns:
            finished = await super().finished_turns(worker)
            if not self.num_lost:
                self.num_lost += 1
                raise DataLost("out of disk")
            return finished

    link = TurnLink(Losing("generator-0", at_once), WORKER, 30.0)
    async with asyncio.timeout(120):
        ends = await asyncio.gather(*(link.sample((n,), SETTINGS) for n in range(3)), return_exceptions=True)
        assert [type(end) for end in ends] == [DataLost] * 3
        assert (await link.sample((4,), SETTINGS)).token_ids.tolist() == [4]


# The router


async def serving(
    generators: Mapping[int, FakeGenerator], silence_s: float = 30.0, has_prefix: int | None = None
) -> tuple[TurnRouter, RoutedSampler]:
    router = TurnRouter("environment-0", silence_s)
    await router.serve(generators)
    sampler = RoutedSampler(router)
    sampler._has_prefix = has_prefix
    return router, sampler


async def test_a_generator_that_dies_in_the_middle_of_turns_costs_the_turns_only() -> None:
    dying, other = FakeGenerator("generator-0", never), FakeGenerator("generator-1", at_once)
    router, sampler = await serving({0: dying})
    turns = asyncio.gather(*(sampler.sample((n,), SETTINGS) for n in range(20)))
    await until(lambda: dying.num_running == 20)
    failures = asyncio.ensure_future(router.failures(0))
    dying.die()
    assert await failures == [(0, "generator-0 died: the test ended it")]
    await asyncio.sleep(0.01)
    assert not turns.done()  # no Generator serves: they wait
    await router.serve({0: dying, 1: other})  # the caller has not heard yet: the dead one stays away
    assert [end.token_ids.tolist() for end in await turns] == [[n] for n in range(20)]
    assert sampler._has_prefix == 1
    assert dying.num_started == 20
    assert len(await router.failures(0)) == 1  # it was not asked again


async def test_a_generator_that_fails_its_turns_is_reported_and_another_one_gets_them() -> None:
    died, silent = "vLLM's engine died", "it had turns and finished none for 0.05 s"
    stopped = FakeGenerator("generator-0", never)
    stopped.begin_turns = stopped.finished_turns = lambda *_: asyncio.sleep(60)  # not even a call returns
    for generator, silence_s, error in (
        (FakeGenerator("generator-0", AsyncMock(side_effect=EngineDied(died))), 30.0, died),
        (FakeGenerator("generator-0", never), 0.05, silent),
        (stopped, 0.05, silent),
    ):
        generators = {4: generator, 7: FakeGenerator("generator-1", at_once)}
        router, sampler = await serving(generators, silence_s, has_prefix=4)
        await asyncio.gather(*(sampler.sample((n,), SETTINGS) for n in range(5)))
        assert sampler._has_prefix == 7
        (failure,) = await router.failures(0)
        assert failure == (4, error)


@pytest.mark.slow
async def test_a_turn_that_waits_for_others_does_not_fail_its_generator() -> None:
    """Turns that are queued, or last longer than the limit, are no fault while any other finishes."""
    order = asyncio.Lock()

    async def one_by_one(token_ids: tuple[int, ...], settings: SamplingSettings) -> Completion:
        async with order:
            await asyncio.sleep(0.05)
        return completion(*token_ids)

    router, sampler = await serving({0: FakeGenerator("generator-0", one_by_one)}, silence_s=0.3)
    ends = await asyncio.gather(*(sampler.sample((n,), SETTINGS) for n in range(12)))  # 0.6 s in all
    assert [end.token_ids.tolist() for end in ends] == [[n] for n in range(12)]
    assert not router._failures


async def test_only_the_last_turn_that_gives_up_stops_the_clock_of_silence_and_a_new_one_starts_it() -> None:
    """Also while the call for news is still open."""
    generator = FakeGenerator("generator-0", never)
    link = TurnLink(generator, WORKER, 60.0)
    turns = [asyncio.ensure_future(link.sample((n,), SETTINGS)) for n in range(2)]
    await until(lambda: generator.num_running == 2)
    is_running = []
    for turn in turns:
        turn.cancel()
        await asyncio.wait({turn})
        is_running.append(link._clock._since is not None)
    assert link._receiving is not None
    last = asyncio.ensure_future(link.sample((2,), SETTINGS))
    await asyncio.sleep(0)
    is_running.append(link._clock._since is not None)
    last.cancel()
    assert is_running == [True, False, True]


@pytest.mark.slow
async def test_a_generator_that_hangs_is_found_by_turns_that_give_up_sooner() -> None:
    """Episodes end by their own clock before the limit; the time of their turns adds up."""
    link = TurnLink(FakeGenerator("generator-0", never), WORKER, 0.3)
    ends: list[str] = []
    while len(ends) < 100 and not (ends and ends[-1]):
        turn = asyncio.ensure_future(link.sample((1,), SETTINGS))
        await asyncio.wait({turn}, timeout=0.05)
        turn.cancel()
        ends += map(str, await asyncio.gather(turn, return_exceptions=True))
    assert ends[-1] == "it had turns and finished none for 0.3 s"
    assert len(ends) > 3


async def test_the_generator_with_the_prefix_is_preferred_unless_it_is_overloaded() -> None:
    generators = [FakeGenerator(f"generator-{n}", never) for n in range(2)]
    _, sampler = await serving(dict(enumerate(generators)), has_prefix=1)
    turns = []
    for _ in range(SLACK + 4):
        turns.append(asyncio.ensure_future(sampler.sample((1,), SETTINGS)))
        await asyncio.sleep(0.01)
    # The preferred one takes turns until it has SLACK + 1 more; then the other gets one, and so on.
    assert [generator.num_running for generator in generators] == [1 + 1, SLACK + 2]
    for turn in turns:
        turn.cancel()
    await asyncio.gather(*turns, return_exceptions=True)


async def test_turns_without_a_prefix_are_spread_evenly_and_a_session_stays_where_it_was() -> None:
    async def slow(token_ids: tuple[int, ...], settings: SamplingSettings) -> Completion:
        await asyncio.sleep(0.005)
        return completion(*token_ids)

    generators = [FakeGenerator(f"generator-{n}", slow) for n in range(2)]
    router, _ = await serving(dict(enumerate(generators)))
    samplers = [RoutedSampler(router) for _ in range(8)]
    for _ in range(3):
        await asyncio.gather(*(sampler.sample((1,), SETTINGS) for sampler in samplers))
    assert [g.num_started for g in generators] == [12, 12]
    assert sorted(sampler._has_prefix for sampler in samplers) == [0] * 4 + [1] * 4


async def test_each_generator_with_an_open_turn_has_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a parallel turn has ended at another one since."""
    monkeypatch.setattr(turn_router, "ANSWER_S", 0.02)
    generators = {0: FakeGenerator("generator-0", never), 1: FakeGenerator("generator-1", at_once)}
    router, sampler = await serving(generators)
    turn = asyncio.ensure_future(sampler.sample((1,), SETTINGS))
    await until(lambda: generators[0].num_running == 1)
    await sampler.sample((2,), SETTINGS)
    turn.cancel()
    await asyncio.wait({turn})
    generators[0].ping_s = 60.0
    await sampler.ran_out_of_time()
    assert isinstance(sampler.lost, TurnUnanswered)
    assert [*router._failures] == [0]


async def test_a_generator_that_no_longer_serves_finishes_its_turns() -> None:
    end: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
    first = FakeGenerator("generator-0", lambda *_: end)
    second = FakeGenerator("generator-1", at_once)
    router, sampler = await serving({0: first}, has_prefix=0)
    turn = asyncio.ensure_future(sampler.sample((1,), SETTINGS))
    await until(lambda: first.num_running == 1)
    await router.serve({1: second})
    await sampler.sample((2,), SETTINGS)
    assert sampler._has_prefix == 1
    end.set_result(completion(5))
    assert ((await turn).token_ids.tolist(), sampler._has_prefix) == ([5], 0)


def test_only_the_time_of_serving_counts() -> None:
    clock = Time(100.0)
    served = ServingTime(now=clock)
    seconds = []
    for is_serving, passed in ((True, 1.0), (False, 10.0), (False, 10.0), (True, 2.0), (True, 4.0)):
        served.set(is_serving)
        clock.seconds += passed
        seconds.append(served.seconds)
    assert seconds == [1.0, 1.0, 1.0, 3.0, 7.0]


async def test_work_that_ends_while_no_generator_serves_is_done_at_once() -> None:
    work: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.05, work.set_result, 1)
    async with asyncio.timeout(120):
        assert await ServingTime(is_serving=False).wait(work, 60.0)


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
