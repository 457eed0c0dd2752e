"""The guards against tokens that are too old, and the whole schedule under them at any speed."""

import asyncio
import itertools
from collections.abc import Iterator

import pytest
from builders import make_completion, make_group, make_item
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_ray.actors.staleness import admission_limit, oldest_allowed
from grpo_ray.actors.trajectory_buffer import TrajectoryBuffer
from grpo_ray.actors.weight_sync import WeightSync


@pytest.mark.parametrize(("max_lag", "limits"), [(0, [4, 8, 12]), (1, [8, 12, 16]), (3, [16, 20, 24])])
def test_admission_limit_by_hand(max_lag: int, limits: list[int]) -> None:
    """max_lag 0: exactly the batch that version 0 trains; each lag allowed is one batch more."""

    async def run() -> list[int]:
        generators = [VersionedGenerator("a", iter([]))]
        sync = WeightSync(generators, max_lag, prompts_per_step=4, phase_timeout_s=5)
        seen = [await sync.admission_limit(above=0)]
        for version in (1, 2):
            await sync.publish(version, [None])
            seen.append(await sync.admission_limit(above=seen[-1]))
        return seen

    assert asyncio.run(run()) == limits
    assert [admission_limit(version, max_lag, 4) for version in (0, 1, 2)] == limits


class VersionedGenerator:
    """Serves the version last loaded, after as many turns of the event loop as told."""

    def __init__(self, name: str, load_turns: Iterator[int]) -> None:
        self.name, self.version, self._load_turns = name, 0, load_turns

    async def pause(self) -> None:
        await turns(1)

    async def load_weights(self, snapshot: object) -> None:
        await turns(next(self._load_turns, 1))
        self.version += 1

    async def resume(self) -> None:
        await turns(1)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def largest_lags(
    max_lag: int, prompts_per_step: int, num_steps: int, token_turns: list[int], train_turns: list[int],
    load_turns: list[int],
) -> list[int]:  # fmt: skip
    """Runs the controller's schedule with tokens and steps that take so many turns; a lag a step."""
    generators = [VersionedGenerator(name, iter(load_turns)) for name in ("a", "b")]
    sync = WeightSync(generators, max_lag, prompts_per_step, phase_timeout_s=60)
    buffer = TrajectoryBuffer(prompts_per_step, max_bytes=2**20)
    speeds = itertools.cycle(token_turns)
    total = num_steps * prompts_per_step

    async def rollout(group_id: int) -> None:
        generator, versions = generators[group_id % 2], []
        for _ in range(3):
            await turns(next(speeds))
            versions.append(generator.version)
        await buffer.put(make_group(make_item(group_id), [make_completion([5, 6, 7], versions=versions)]))

    async def produce(tasks: asyncio.TaskGroup) -> None:
        dispatched = 0
        while dispatched < total:
            limit = min(await sync.admission_limit(above=dispatched), total)
            for group_id in range(dispatched, limit):
                tasks.create_task(rollout(group_id))
            dispatched = limit

    lags = []
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(produce(tasks))
        publishing = None
        for step in range(num_steps):
            batch, facts = await buffer.take(step, oldest_allowed(step, max_lag))
            assert facts.rejected_items == ()
            lags.append(step - min(group.rollout.oldest_version for group in batch.groups))
            await turns(train_turns[step % len(train_turns)])
            if publishing is not None:
                await publishing
            publishing = tasks.create_task(sync.publish(step + 1, [None]))
    return lags


SPEEDS = st.lists(st.integers(0, 40), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    max_lag=st.integers(0, 3), prompts_per_step=st.integers(1, 3), token_turns=SPEEDS, train_turns=SPEEDS,
    load_turns=SPEEDS,
)  # fmt: skip
def test_no_token_is_older_than_max_lag_at_any_speed(
    max_lag: int, prompts_per_step: int, token_turns: list[int], train_turns: list[int], load_turns: list[int]
) -> None:
    run = largest_lags(max_lag, prompts_per_step, 6, token_turns, train_turns, load_turns)
    lags = asyncio.run(asyncio.wait_for(run, 60))
    assert len(lags) == 6
    assert max(lags) <= max_lag


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_fast_generators_run_ahead_as_far_as_max_lag_allows(max_lag: int) -> None:
    """Admission that is tighter than need be would waste the Generators' time."""
    lags = asyncio.run(largest_lags(max_lag, 2, 6, token_turns=[0], train_turns=[200], load_turns=[1]))
    assert lags == [min(step, max_lag) for step in range(6)]


@given(version=st.integers(0, 100), max_lag=st.integers(0, 10), prompts_per_step=st.integers(1, 50))
def test_the_two_guards_agree(version: int, max_lag: int, prompts_per_step: int) -> None:
    """The last group admitted at a version is trained while that version is just allowed."""
    last_group = admission_limit(version, max_lag, prompts_per_step) - 1
    trained_at = last_group // prompts_per_step
    assert oldest_allowed(trained_at, max_lag) == version
    assert oldest_allowed(trained_at + 1, max_lag) > version  # one group more would be too old
