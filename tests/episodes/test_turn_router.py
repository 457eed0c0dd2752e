"""Turns on their way to Generators: batched, routed by their prefix, and kept when a Generator fails."""

import asyncio
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from turn_clients import SETTINGS, FakeGenerator, at_once, completion, never, until

from grpo_ray.engines.base import EngineDied
from grpo_ray.episodes.turn_box import FinishedTurns, TurnBox, TurnBoxes, Worker
from grpo_ray.episodes.turn_link import SilenceAlarm, TurnLink
from grpo_ray.episodes.turn_router import SLACK, RoutedSampler, TurnRouter
from grpo_ray.errors import DataLost
from grpo_ray.types import Completion, SamplingSettings

WORKER = "environment-0", "one process"


def same(one: Completion, other: Completion) -> bool:
    arrays = ("token_ids", "logprobs", "versions")
    facts = (one.text, one.finish_reason) == (other.text, other.finish_reason)
    return facts and all(
        np.array_equal(getattr(one, name), getattr(other, name))
        and getattr(one, name).dtype == getattr(other, name).dtype
        for name in arrays
    )


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), max_size=5))
def test_finished_turns_travel_unchanged(rows: list[list[int]]) -> None:
    completions = {3 * n + 1: completion(*ids, text=f"text {n}", version=n) for n, ids in enumerate(rows)}
    sent = FinishedTurns(completions, {2: EngineDied("gone")})
    got = pickle.loads(pickle.dumps(sent))
    assert got.completions.keys() == completions.keys()
    assert all(same(got.completions[n], c) for n, c in completions.items())
    assert [str(error) for error in got.errors.values()] == ["gone"]


def test_a_box_reports_each_turn_once_and_cancelled_ones_never() -> None:
    async def work() -> None:
        ends = {n: asyncio.get_running_loop().create_future() for n in range(4)}

        async def sample(token_ids: tuple[int, ...], settings: SamplingSettings) -> Completion:
            return await ends[token_ids[0]]

        box = TurnBox(sample)
        box.begin({10 + n: ((n,), SETTINGS) for n in range(4)}, [])
        await asyncio.sleep(0)
        box.begin({}, [11])
        ends[0].set_result(completion(7))
        ends[2].set_exception(EngineDied("gone"))
        await asyncio.sleep(0.01)
        first = await box.finished()
        assert list(first.completions) == [10]
        assert list(first.errors) == [12]
        waiting = asyncio.ensure_future(box.finished())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        assert ends[1].cancelled()
        ends[3].set_result(completion(8))
        assert list((await waiting).completions) == [13]

    asyncio.run(work())


def test_a_box_of_a_dead_process_is_closed_once_its_successor_comes() -> None:
    async def work() -> None:
        boxes = TurnBoxes(never)
        old = boxes.of(("environment-0", "first"))
        old.begin({0: ((1,), SETTINGS)}, [])
        other = boxes.of(("environment-1", "its own"))
        await asyncio.sleep(0)
        (task,) = old._running.values()
        new = boxes.of(("environment-0", "second"))
        assert new is not old
        assert boxes.of(("environment-0", "second")) is new
        assert boxes.of(("environment-1", "its own")) is other
        await asyncio.wait({task})
        assert task.cancelled()
        assert (await old.finished()).completions == {}  # its call, if there is one, ends too

    asyncio.run(work())


def test_a_late_call_of_a_dead_process_leaves_its_successors_turns_alone() -> None:
    """Its call may be executed after its replacement's first, as after a SIGCONT."""

    async def work() -> None:
        boxes = TurnBoxes(never)
        boxes.of(("environment-0", "first"))
        new = boxes.of(("environment-0", "second"))
        new.begin({0: ((1,), SETTINGS)}, [])
        await asyncio.sleep(0)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="process of environment-0 has been replaced"):
                boxes.of(("environment-0", "first"))
        (task,) = new._running.values()
        assert not task.cancelling()
        assert boxes.of(("environment-0", "second")) is new
        new.close()

    asyncio.run(work())


def test_a_cancelled_turn_is_not_reported_with_its_error_either() -> None:
    async def failing(token_ids: tuple[int, ...], settings: SamplingSettings) -> Completion:
        raise ValueError("the prompt is too long")

    async def work() -> None:
        box = TurnBox(failing)
        box.begin({0: ((1,), SETTINGS), 1: ((2,), SETTINGS)}, [])
        await asyncio.sleep(0)  # both have failed, and the worker has not asked yet
        box.begin({}, [0])
        assert list((await box.finished()).errors) == [1]

    asyncio.run(work())


def test_turns_that_come_together_go_out_together() -> None:
    async def work() -> None:
        generator = FakeGenerator("generator-0", at_once)
        link = TurnLink(generator, WORKER, 30.0)
        ends = await asyncio.gather(*(link.sample((n,), SETTINGS) for n in range(100)))
        assert [int(end.token_ids[0]) for end in ends] == list(range(100))
        assert generator.calls == [100]
        assert link.num_turns == 0

    asyncio.run(work())


def test_no_turn_is_lost_or_mixed_up_when_they_come_and_end_in_any_order() -> None:
    async def work() -> None:
        rng = np.random.default_rng(0)

        async def sample(token_ids: tuple[int, ...], settings: SamplingSettings) -> Completion:
            await asyncio.sleep(rng.random() * 0.02)
            return completion(*token_ids)

        link = TurnLink(FakeGenerator("generator-0", sample), WORKER, 30.0)

        async def episode(number: int) -> None:
            for turn in range(5):
                await asyncio.sleep(rng.random() * 0.01)
                got = await link.sample((number, turn), SETTINGS)
                assert got.token_ids.tolist() == [number, turn]

        async with asyncio.timeout(120):
            await asyncio.gather(*map(episode, range(50)))
        assert link.num_turns == 0

    asyncio.run(work())


@pytest.mark.parametrize("is_sent", [False, True])
def test_a_cancelled_turn_ends_in_the_generator(is_sent: bool) -> None:
    async def work() -> None:
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

    asyncio.run(work())


def test_an_error_of_a_call_fails_the_turns_that_wait_for_it_and_no_later_one() -> None:
    class Losing(FakeGenerator):
        num_lost = 0

        async def finished_turns(self, worker: Any) -> FinishedTurns:
            finished = await super().finished_turns(worker)
            if not self.num_lost:
                self.num_lost += 1
                raise DataLost("out of disk")
            return finished

    async def work() -> None:
        link = TurnLink(Losing("generator-0", at_once), WORKER, 30.0)
        async with asyncio.timeout(120):
            ends = await asyncio.gather(
                *(link.sample((n,), SETTINGS) for n in range(3)), return_exceptions=True
            )
            assert [type(end) for end in ends] == [DataLost] * 3
            assert (await link.sample((4,), SETTINGS)).token_ids.tolist() == [4]

    asyncio.run(work())


# The router


def test_a_generator_that_dies_in_the_middle_of_turns_costs_the_turns_only() -> None:
    async def work() -> None:
        dying, other = FakeGenerator("generator-0", never), FakeGenerator("generator-1", at_once)
        router = TurnRouter("environment-0", 30.0)
        await router.serve({0: dying})
        turns = asyncio.gather(*(router.sample((n,), SETTINGS, None) for n in range(20)))
        await until(lambda: dying.num_running == 20)
        failures = asyncio.ensure_future(router.failures(0))
        dying.die()
        (failure,) = await failures
        assert (failure.number, failure.error) == (0, "generator-0 died: the test ended it")
        await asyncio.sleep(0.01)
        assert not turns.done()  # no Generator serves: they wait
        await router.serve({0: dying, 1: other})  # the caller has not heard yet: the dead one stays away
        got = await turns
        assert [(end.token_ids.tolist(), number) for end, number in got] == [([n], 1) for n in range(20)]
        assert dying.num_started == 20

    asyncio.run(work())


def test_an_engine_that_died_fails_its_generator() -> None:
    async def dead(token_ids: tuple[int, ...], settings: SamplingSettings) -> Completion:
        raise EngineDied("vLLM's engine died")

    async def work() -> None:
        router = TurnRouter("environment-0", 30.0)
        await router.serve({4: FakeGenerator("generator-0", dead), 7: FakeGenerator("generator-1", at_once)})
        ends = await asyncio.gather(*(router.sample((n,), SETTINGS, 4) for n in range(5)))
        assert [number for _, number in ends] == [7] * 5
        (failure,) = await router.failures(0)
        assert (failure.number, failure.error) == (4, "vLLM's engine died")

    asyncio.run(work())


def test_a_generator_that_hangs_is_reported_after_the_limit() -> None:
    async def work() -> None:
        hung = FakeGenerator("generator-0", never)
        router = TurnRouter("environment-0", 0.05)
        await router.serve({0: hung, 1: FakeGenerator("generator-1", at_once)})
        _, number = await router.sample((1,), SETTINGS, 0)
        assert number == 1
        (failure,) = await router.failures(0)
        assert (failure.number, failure.error) == (0, "it had turns and finished none for 0.05 s")

    asyncio.run(work())


@pytest.mark.slow
def test_a_turn_that_waits_for_others_does_not_fail_its_generator() -> None:
    """Turns that are queued, or last longer than the limit, are no fault while any other finishes."""

    async def work() -> None:
        order = asyncio.Lock()

        async def one_by_one(token_ids: tuple[int, ...], settings: SamplingSettings) -> Completion:
            async with order:
                await asyncio.sleep(0.05)
            return completion(*token_ids)

        router = TurnRouter("environment-0", 0.3)
        await router.serve({0: FakeGenerator("generator-0", one_by_one)})
        ends = await asyncio.gather(*(router.sample((n,), SETTINGS, 0) for n in range(12)))  # 0.6 s in all
        assert [end.token_ids.tolist() for end, _ in ends] == [[n] for n in range(12)]
        assert not router._failures

    asyncio.run(work())


@pytest.mark.slow
def test_time_without_turns_is_no_silence() -> None:
    async def work() -> None:
        ends: list[asyncio.Future[Completion]] = [asyncio.Future(), asyncio.Future()]
        link = TurnLink(FakeGenerator("generator-0", lambda ids, _: ends[ids[0]]), WORKER, 0.3)
        first = asyncio.ensure_future(link.sample((0,), SETTINGS))
        await asyncio.sleep(0.05)
        first.cancel()
        await asyncio.sleep(0.2)  # the call for news is still open, and nothing is expected
        second = asyncio.ensure_future(link.sample((1,), SETTINGS))
        await asyncio.sleep(0.15)  # 0.4 s after the first turn began; 0.2 s of them with a turn
        ends[1].set_result(completion(5))
        assert (await second).token_ids.tolist() == [5]

    asyncio.run(work())


def test_a_late_answer_of_a_cancelled_turn_starts_no_clock() -> None:
    """Else the next turn would be failed for the time in which there was none."""

    class Slow(FakeGenerator):
        async def finished_turns(self, worker: Worker) -> FinishedTurns:
            finished = await super().finished_turns(worker)
            on_its_way.set()
            await arrives.wait()
            return finished

    async def work() -> None:
        link = TurnLink(Slow("generator-0", at_once), WORKER, 60.0)
        turn = asyncio.ensure_future(link.sample((0,), SETTINGS))
        async with asyncio.timeout(60):
            await on_its_way.wait()
            assert link._alarm._timer is not None
            turn.cancel()
            await asyncio.wait({turn})
            arrives.set()
            await until(lambda: link._receiving is None)
        assert link._alarm._timer is None
        assert link._alarm._left_s == 60.0

    on_its_way, arrives = asyncio.Event(), asyncio.Event()
    asyncio.run(work())


def test_a_turn_that_gives_up_stops_the_clock_only_if_it_is_the_last() -> None:
    async def work() -> None:
        link = TurnLink(FakeGenerator("generator-0", never), WORKER, 60.0)
        turns = [asyncio.ensure_future(link.sample((n,), SETTINGS)) for n in range(2)]
        await asyncio.sleep(0)
        is_running = []
        for turn in turns:
            turn.cancel()
            await asyncio.wait({turn})
            is_running.append(link._alarm._timer is not None)
        assert is_running == [True, False]

    asyncio.run(work())


def test_an_alarm_that_rang_rings_again() -> None:
    async def work() -> None:
        rung = asyncio.Event()
        alarm = SilenceAlarm(0.01, rung.set)
        for _ in range(3):
            alarm.run()
            async with asyncio.timeout(60):
                await rung.wait()
            rung.clear()

    asyncio.run(work())


@pytest.mark.slow
def test_a_generator_that_hangs_is_found_by_turns_that_give_up_sooner() -> None:
    """Episodes end by their own clock before the limit; the time of their turns adds up."""

    async def work() -> None:
        link = TurnLink(FakeGenerator("generator-0", never), WORKER, 0.3)
        ends: list[str] = []
        while len(ends) < 100 and not (ends and ends[-1]):
            turn = asyncio.ensure_future(link.sample((1,), SETTINGS))
            await asyncio.wait({turn}, timeout=0.05)
            turn.cancel()
            ends += map(str, await asyncio.gather(turn, return_exceptions=True))
        assert ends[-1] == "it had turns and finished none for 0.3 s"
        assert len(ends) > 3

    asyncio.run(work())


def test_a_generator_that_does_not_even_answer_is_reported_too() -> None:
    class Stopped(FakeGenerator):
        async def begin_turns(self, *_: Any) -> None:
            await asyncio.sleep(60)

        async def finished_turns(self, worker: Any) -> FinishedTurns:
            await asyncio.sleep(60)
            raise AssertionError

    async def work() -> None:
        router = TurnRouter("environment-0", 0.05)
        await router.serve({0: Stopped("generator-0", never), 1: FakeGenerator("generator-1", at_once)})
        ends = await asyncio.gather(*(router.sample((n,), SETTINGS, 0) for n in range(3)))
        assert [number for _, number in ends] == [1] * 3
        assert [failure.number for failure in await router.failures(0)] == [0]

    asyncio.run(work())


def test_an_error_that_is_no_death_is_the_turns_own() -> None:
    async def failing(token_ids: tuple[int, ...], settings: SamplingSettings) -> Completion:
        raise ValueError("the prompt is too long")

    async def work() -> None:
        router = TurnRouter("environment-0", 30.0)
        await router.serve({0: FakeGenerator("generator-0", failing)})
        with pytest.raises(ValueError, match="too long"):
            await router.sample((1,), SETTINGS, None)
        assert not asyncio.ensure_future(router.failures(0)).done()

    asyncio.run(work())


def test_the_generator_with_the_prefix_is_preferred_unless_it_is_overloaded() -> None:
    async def work() -> None:
        generators = [FakeGenerator(f"generator-{n}", never) for n in range(2)]
        router = TurnRouter("environment-0", 30.0)
        await router.serve(dict(enumerate(generators)))
        turns = []
        for _ in range(SLACK + 4):
            turns.append(asyncio.ensure_future(router.sample((1,), SETTINGS, 1)))
            await asyncio.sleep(0.01)
        # The preferred one takes turns until it has SLACK + 1 more; then the other gets one, and so on.
        assert [generator.num_running for generator in generators] == [1 + 1, SLACK + 2]
        for turn in turns:
            turn.cancel()
        await asyncio.gather(*turns, return_exceptions=True)

    asyncio.run(work())


def test_turns_without_a_prefix_are_spread_evenly_and_a_session_stays_where_it_was() -> None:
    async def slow(token_ids: tuple[int, ...], settings: SamplingSettings) -> Completion:
        await asyncio.sleep(0.005)
        return completion(*token_ids)

    async def work() -> None:
        generators = [FakeGenerator(f"generator-{n}", slow) for n in range(2)]
        router = TurnRouter("environment-0", 30.0)
        await router.serve(dict(enumerate(generators)))
        samplers = [RoutedSampler(router) for _ in range(8)]
        for _ in range(3):
            await asyncio.gather(*(sampler.sample((1,), SETTINGS) for sampler in samplers))
        assert [g.num_started for g in generators] == [12, 12]
        assert sorted(sampler._has_prefix for sampler in samplers) == [0] * 4 + [1] * 4

    asyncio.run(work())


def test_a_generator_that_no_longer_serves_finishes_its_turns() -> None:
    async def work() -> None:
        end: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        first = FakeGenerator("generator-0", lambda *_: end)
        second = FakeGenerator("generator-1", at_once)
        router = TurnRouter("environment-0", 30.0)
        await router.serve({0: first})
        turn = asyncio.ensure_future(router.sample((1,), SETTINGS, None))
        await until(lambda: first.num_running == 1)
        await router.serve({1: second})
        assert (await router.sample((2,), SETTINGS, 0))[1] == 1
        end.set_result(completion(5))
        got, number = await turn
        assert (got.token_ids.tolist(), number) == ([5], 0)

    asyncio.run(work())
