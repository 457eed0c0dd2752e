"""The queue in front of the engines, with clients that do nothing."""

import asyncio
import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_ray.core.dispatch import Dispatcher

NUMBERS = itertools.count()


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
    names = await asyncio.gather(*tasks)
    assert len(names) == 40
    assert all(generator.num_sequences == 0 for generator in dispatcher.serving.values())


async def test_a_group_larger_than_the_engine_runs_alone() -> None:
    dispatcher, done = Dispatcher([client("a")], max_num_seqs=2), asyncio.Event()
    tasks = [asyncio.create_task(hold(dispatcher, 16, done)) for _ in range(3)]
    await asyncio.sleep(0.01)
    assert dispatcher.serving["a"].num_sequences == 16
    done.set()
    await asyncio.gather(*tasks)


@pytest.mark.slow
async def test_time_in_the_queue_does_not_count_against_the_limit() -> None:
    """Six groups of 4, one after another on an engine for 4: each takes 0.1 s, the last 0.6 s with its wait."""
    dispatcher, engine = Dispatcher([client("a")], max_num_seqs=4), asyncio.Lock()

    async def sample() -> None:
        async with dispatcher.room(4) as generator, dispatcher.slot(generator, 4, limit_s=0.4), engine:
            await asyncio.sleep(0.1)

    await asyncio.gather(*(sample() for _ in range(6)))


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


async def test_groups_wait_for_a_generator_to_serve() -> None:
    dispatcher, done = Dispatcher([client("a")], max_num_seqs=8), asyncio.Event()
    dispatcher.remove("a")
    task = asyncio.create_task(hold(dispatcher, 4, done))
    await asyncio.sleep(0.01)
    dispatcher.add(client("b"))
    done.set()
    assert await task == "b"


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
