"""The queue of groups (windows, look-ahead, drops for lack of signal), and the dispatch to Generators."""

import asyncio
import itertools
import random
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from turn_clients import NUMBERS

from grpo_ray.core.batch_queue import BatchQueue
from grpo_ray.core.dispatch import Dispatcher


def test_look_ahead_by_hand() -> None:
    queue = BatchQueue(2, lookahead=3)
    assert queue.window() == [0, 1, 2, 3]
    assert queue.batch([4, 3]) is None  # 4 is beyond the window
    assert queue.batch([3, 1, 4]) == (1, 3)  # in order of ids
    assert queue.batch([3, 2, 1, 0]) == (0, 1)  # the first in the queue, not the first to finish
    queue.train((1, 3))
    assert queue.window()[0] == 0
    assert queue.batch([2, 4]) is None  # 0 may be one batch late, and no more
    assert queue.batch([0, 2]) == (0, 2)


def test_first_come_by_hand() -> None:
    queue = BatchQueue(2, first_come=True)
    assert queue.batch([7]) is None
    assert queue.batch([7, 900, 0]) == (7, 900)  # the first to finish, in order of ids
    queue.train((7, 900))
    assert queue.batch([7, 3]) is None  # 7 is no longer in the queue
    assert queue.batch([7, 3, 0]) == (0, 3)


def test_groups_that_are_awaited_by_hand() -> None:
    strict, ahead, first = BatchQueue(2), BatchQueue(2, lookahead=2), BatchQueue(2, first_come=True)
    for queue in (strict, ahead, first):
        queue.leave([1])
    assert [g for g in range(6) if strict.is_awaited(g)] == [0, 2]
    assert [g for g in range(6) if ahead.is_awaited(g)] == [0, 2, 3]
    assert [g for g in range(6) if first.is_awaited(g)] == [0, 2, 3, 4, 5]


def test_queue_of_a_resumed_run_by_hand() -> None:
    queue = BatchQueue(3)
    queue.begin([5, 3], next_id=7)
    assert queue.window() == [3, 5, 7]
    assert [g for g in range(10) if queue.holds(g)] == [3, 5, 7, 8, 9]
    queue.begin([], next_id=4)
    assert queue.window() == [4, 5, 6]
    assert not queue.holds(3)
    queue.begin([0, 2], next_id=3)
    assert queue.window() == [0, 2, 3]
    ahead = BatchQueue(2, lookahead=2)
    ahead.begin([0, 3, 4], next_id=5)  # 1 and 2 were trained: 0 is due
    assert ahead.batch([3, 4, 5, 6]) is None
    assert ahead.batch([3, 4, 0]) == (0, 3)


class Counted(dict[int, bool]):
    """Finished groups that count how often they are looked at."""

    num_looks = 0

    def __contains__(self, group_id: object) -> bool:
        self.num_looks += 1
        return super().__contains__(group_id)

    def __iter__(self) -> Iterator[int]:
        self.num_looks += len(self)
        return super().__iter__()


@pytest.mark.parametrize("size", [10, 1000])
@pytest.mark.parametrize("options", [{}, {"lookahead": 4}, {"first_come": True}])
def test_a_group_costs_the_same_in_any_batch(size: int, options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffer asks whether a group is awaited, and for a batch, with every group that it is given."""
    num_held, holds = 0, BatchQueue.holds

    def counted_holds(queue: BatchQueue, group_id: int) -> bool:
        nonlocal num_held
        num_held += 1
        return holds(queue, group_id)

    monkeypatch.setattr(BatchQueue, "holds", counted_holds)
    queue, finished = BatchQueue(size, **options), Counted()
    last = queue.window()[-1]
    for number, group_id in enumerate(range(last, 0, -1), start=1):  # 0 is missing to the last
        assert queue.is_awaited(group_id)
        finished[group_id] = True
        assert (queue.batch(finished) is None) == (number < size or not options)
    assert num_held <= 6 * last
    assert finished.num_looks <= 6 * last


# ---- groups without signal ----


@pytest.mark.parametrize(
    ("max_dropped", "has_signal", "dropped"),
    [
        (2, {0: False}, (0,)),
        (2, {0: True, 1: False}, (1,)),
        (2, {0: False, 1: False}, (0, 1)),
        (1, {0: False, 1: False}, (0,)),  # no more than max_dropped
        (0, {0: False}, ()),
        (1, {1: False}, ()),  # 0 might be dropped instead
        (2, {1: False}, (1,)),  # even if 0 is dropped as well
        (2, {1: False, 2: False}, (1,)),  # 0 might be the second drop
        (3, {2: False}, ()),  # 0 and 1 might fill the batch
        (3, {0: True, 2: False}, ()),
        (3, {0: True, 1: True, 2: False}, ()),  # 0 and 1 fill the batch
        (3, {0: False, 2: False}, (0, 2)),  # 1 alone does not fill it
        (4, {0: False, 3: False}, (0,)),  # 1 and 2 might fill it
    ],
)
def test_strict_queue_drops_only_groups_that_are_certain_to_be_dropped(
    max_dropped: int, has_signal: dict[int, bool], dropped: tuple[int, ...]
) -> None:
    queue = BatchQueue(2, max_dropped=max_dropped)
    assert queue.drop(has_signal) == dropped
    assert not any(queue.holds(group_id) for group_id in dropped)
    rest = {g: s for g, s in has_signal.items() if g not in dropped}
    assert queue.drop(rest) == ()  # nothing has changed since then


@pytest.mark.parametrize("options", [{"lookahead": 2}, {"first_come": True}])
def test_other_queues_drop_groups_without_signal_as_they_arrive(options: dict) -> None:
    queue = BatchQueue(2, **options, max_dropped=2)
    assert queue.drop({1: False, 2: True}) == (1,)
    assert queue.drop({2: True, 3: False}) == (3,)
    assert queue.drop({2: True, 4: False}) == ()  # would be a third
    queue.train([0, 2])
    assert queue.drop({4: False}) == (4,)


# ---- whole schedules ----

Step = tuple[tuple[int, ...], tuple[int, ...]]  # a batch, and the groups dropped for it


def play(
    queue: BatchQueue, arrival: Sequence[int], signals: Sequence[bool], aside: set[int], takes: Sequence[bool]
) -> list[Step]:
    """Do as the buffer does: add groups in the order of `arrival`, take batches at times, and at the end."""
    finished: dict[int, bool] = {}
    steps: list[Step] = []
    dropped: list[int] = []

    def settle() -> None:
        for group_id in queue.drop(finished):
            finished.pop(group_id)
            dropped.append(group_id)

    def take() -> None:
        while (batch := queue.batch(finished)) is not None:
            for group_id in batch:
                finished.pop(group_id)
            queue.train(batch)
            steps.append((batch, tuple(sorted(dropped))))
            dropped.clear()
            settle()

    for group_id, is_taken in zip(arrival, itertools.cycle(takes), strict=False):
        if group_id in aside:
            queue.leave([group_id])
        else:
            finished[group_id] = signals[group_id]
        settle()
        if is_taken:
            take()
    take()
    return steps


def slow_strict(size: int, max_dropped: int, signals: Sequence[bool], aside: set[int]) -> Iterator[Step]:
    """Yield each step in strict order, knowing all signals: the reference for `play`."""
    batch: list[int] = []
    dropped: list[int] = []
    for group_id, has_signal in enumerate(signals):
        if group_id in aside:
            continue
        if has_signal or len(dropped) == max_dropped:
            batch.append(group_id)
        else:
            dropped.append(group_id)
        if len(batch) == size:
            yield tuple(batch), tuple(dropped)
            batch, dropped = [], []


NUM = 16
ARRIVAL = st.permutations(range(NUM))
SIGNALS = st.lists(st.booleans(), min_size=NUM, max_size=NUM)
ASIDE = st.sets(st.integers(0, NUM - 1), max_size=4)
TAKES = st.lists(st.booleans(), min_size=1, max_size=5)


@pytest.mark.slow
@settings(max_examples=150)
@given(st.integers(1, 4), st.integers(0, 6), ARRIVAL, SIGNALS, ASIDE, TAKES)
def test_strict_batches_do_not_depend_on_the_order_of_arrival(
    size: int, max_dropped: int, arrival: list[int], signals: list[bool], aside: set[int], takes: list[bool]
) -> None:
    steps = play(BatchQueue(size, max_dropped=max_dropped), arrival, signals, aside, takes)
    assert steps == list(slow_strict(size, max_dropped, signals, aside))


def client(name: str) -> Any:
    return SimpleNamespace(name=name, number=next(NUMBERS))


async def hold(dispatcher: Dispatcher, num_sequences: int, done: asyncio.Event, limit_s: float = 60.0) -> str:
    async with dispatcher.room(num_sequences) as generator, dispatcher.slot(generator, num_sequences, limit_s):
        await done.wait()
        return generator.client.name


async def test_work_in_flight_is_bounded_and_balanced() -> None:
    """40 groups of 8 for two engines that run 32 sequences each: 8 groups each, and 24 wait."""
    dispatcher, done = Dispatcher([client("a"), client("b")], max_num_seqs=32), asyncio.Event()
    tasks = [asyncio.create_task(hold(dispatcher, 8, done)) for _ in range(40)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert {name: gen.num_sequences for name, gen in dispatcher.serving.items()} == {"a": 64, "b": 64}
    done.set()
    assert len(await asyncio.gather(*tasks)) == 40
    assert all(generator.num_sequences == 0 for generator in dispatcher.serving.values())


async def test_a_group_larger_than_the_engine_runs_alone() -> None:
    dispatcher, done = Dispatcher([client("a")], max_num_seqs=2), asyncio.Event()
    tasks = [asyncio.create_task(hold(dispatcher, 16, done)) for _ in range(3)]
    await asyncio.sleep(0.01)
    assert dispatcher.serving["a"].num_sequences == 16
    done.set()
    await asyncio.gather(*tasks)


@pytest.mark.slow
async def test_a_group_that_its_engine_has_scheduled_is_ended_at_the_limit() -> None:
    dispatcher, never = Dispatcher([client("a")], max_num_seqs=8), asyncio.Event()
    tasks = [asyncio.create_task(hold(dispatcher, 4, never, limit_s=0.1)) for _ in range(3)]
    ended = await asyncio.gather(*tasks[:2], return_exceptions=True)
    assert [type(error) for error in ended] == [TimeoutError, TimeoutError]
    assert not tasks[2].done()  # its clock started when the first two had left
    with pytest.raises(TimeoutError):
        await tasks[2]
    assert dispatcher.serving["a"].num_sequences == 0


@pytest.mark.slow
def test_no_room_is_lost_however_groups_end() -> None:
    """Random ends, cancellations at every stage and replacements leave every engine empty."""

    async def run(seed: int) -> None:
        chance = random.Random(seed)
        dispatcher = Dispatcher([client("a"), client("b")], max_num_seqs=8)

        async def sample() -> None:
            size, limit_s = chance.choice([1, 4, 9]), chance.choice([0.002, 60.0])
            async with (
                dispatcher.room(size, is_alone=chance.random() < 0.2) as generator,
                dispatcher.slot(generator, size, limit_s),
            ):
                await asyncio.sleep(chance.choice([0, 0.001, 0.004]))

        tasks = [asyncio.create_task(sample()) for _ in range(60)]
        for task in tasks:
            await asyncio.sleep(chance.choice([0, 0, 0.0005]))
            if chance.random() < 0.3:
                task.cancel()
            if chance.random() < 0.1:
                name = chance.choice("ab")
                dispatcher.remove(name)
                dispatcher.add(client(name))
        ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 120)
        assert all(end is None or isinstance(end, asyncio.CancelledError | TimeoutError) for end in ends)
        assert [gen.num_sequences for gen in dispatcher.serving.values()] == [0, 0]
        assert not dispatcher._waiting

    for seed in range(40):
        asyncio.run(run(seed))


def test_the_least_busy_generator_is_found_as_a_search_of_all_would_find_it() -> None:
    """Random turns of random sizes, with Generators that come and go; the heap stays in proportion to them."""

    async def run(seed: int) -> None:
        rng = random.Random(seed)
        dispatcher = Dispatcher([client(f"g{n}") for n in range(5)], max_num_seqs=1000)
        held: list[tuple[asyncio.Event, asyncio.Task[str]]] = []
        for turn in range(400):
            choice = rng.random()
            if choice < 0.5 or not held:
                loads = {name: each.num_sequences for name, each in dispatcher.serving.items()}
                expected = min(loads, key=lambda name: loads[name])  # the first of several
                done = asyncio.Event()
                task = asyncio.create_task(hold(dispatcher, rng.randint(1, 4), done))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                after = {name: each.num_sequences for name, each in dispatcher.serving.items()}
                assert [name for name in loads if after[name] != loads[name]] == [expected], turn
                held.append((done, task))
            elif choice < 0.9:
                done, task = held.pop(rng.randrange(len(held)))
                done.set()
                await task
            else:
                name = rng.choice(sorted(dispatcher.serving))
                dispatcher.remove(name)
                dispatcher.add(client(name))
            assert len(dispatcher._loads) <= 8 * 5 + 64 + 1
        for done, task in held:
            done.set()
            await task
        assert all(each.num_sequences == 0 for each in dispatcher.serving.values())

    for seed in range(5):
        asyncio.run(run(seed))
