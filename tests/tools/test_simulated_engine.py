"""The simulated engine, with times computed by hand, on the virtual clock."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from builders import make_settings, update

from grpo_ray.engines.base import EngineDied
from grpo_ray.tools.simulation.engine import SimulatedEngine
from grpo_ray.tools.simulation.speeds import Lengths, Speeds, lognormal, recorded
from grpo_ray.transfer.messages import WeightSnapshot
from grpo_ray.types import Completion
from grpo_ray.watch.clock import Deadlock, VirtualClock

# 1 s per token, and 0.5 s more for every running sequence; a prompt of 4 tokens takes 2 s.
SPEEDS = Speeds(decode_s=1.0, decode_sequence_s=0.5, prefill_token_s=0.5, start_s=10.0, stage_s=3.0, load_s=7.0)
PROMPT = (0,) * 4
ONE = make_settings(min_tokens=1, max_tokens=1000)
Now = Callable[[], float]


def given(*lengths: int) -> Lengths:
    drawn = iter(lengths)
    return lambda rng, num_samples: np.array([next(drawn) for _ in range(num_samples)])


def run(lengths: Any, main: Callable[[SimulatedEngine, Now], Awaitable[Any]], **changes: Any) -> Any:
    """Return what `main` returns, given a started engine and the seconds since then."""
    speeds = SPEEDS.model_copy(update=changes.pop("speeds", {}))
    engine = SimulatedEngine(speeds, lengths, **{"max_num_seqs": 8, "seed": 0, **changes})

    async def whole() -> Any:
        await engine.start(version=5)
        loop = asyncio.get_running_loop()
        return await main(engine, lambda: round(loop.time() - 10.0, 6))

    return VirtualClock().run(whole())


@pytest.mark.parametrize(
    ("lengths", "groups", "max_num_seqs", "ends"),
    [
        ([6], [(0.0, PROMPT, 1)], 8, [4 * 0.5 + 6 * 1.5]),
        # Two tokens together at 2 s each, then two of the longer one at 1.5 s; the prompt is computed once.
        ([2, 4], [(0.0, PROMPT, 2)], 8, [2 + 2 * 2.0 + 2 * 1.5]),
        # At 5 s the first has two of its three tokens. Both wait 2 s; then one token together, and two alone.
        ([3, 3], [(0.0, PROMPT, 1), (5.0, PROMPT, 1)], 8, [5 + 2 + 2.0, 5 + 2 + 2.0 + 2 * 1.5]),
        ([2, 4], [(0.0, (), 2)], 1, [2 * 1.5 + 4 * 1.5]),  # sequences beyond the batch wait for a place
    ],
)
def test_groups_take_their_prompts_and_tokens_and_slow_each_other_down(
    lengths: list[int], groups: list[tuple[float, tuple[int, ...], int]], max_num_seqs: int, ends: list[float]
) -> None:
    async def main(engine: SimulatedEngine, now: Now) -> list[float]:
        async def sample(after_s: float, prompt: tuple[int, ...], num_samples: int) -> float:
            await asyncio.sleep(after_s)
            for completion in await engine.generate(prompt, replace(ONE, num_samples=num_samples)):
                assert completion.versions.tolist() == [5] * len(completion.token_ids)
                assert len(completion.logprobs) == len(completion.token_ids)
            return now()

        return list(await asyncio.gather(*(sample(*group) for group in groups)))

    assert run(given(*lengths), main, max_num_seqs=max_num_seqs) == ends


async def sampled_beside_sync(engine: SimulatedEngine, now: Now, sample_at: float, sync_at: float) -> Any:
    """Return the end of a response, and its tokens' versions."""

    async def sync() -> None:
        await asyncio.sleep(sync_at)
        await update(engine, WeightSnapshot(6, (), np.empty(0, np.uint8)))

    async def sample() -> tuple[float, list[int]]:
        await asyncio.sleep(sample_at)
        (completion,) = await engine.generate((), ONE)
        return now(), completion.versions.tolist()

    return (await asyncio.gather(sample(), sync()))[0]


def test_a_sync_splits_a_response_and_keeps_its_tokens() -> None:
    """Paused at 4.5 s with three tokens, for 1.5 s (a token) and 7 s; keys are computed anew after it."""
    main, versions = partial(sampled_beside_sync, sample_at=0.0, sync_at=1.5), [5, 5, 5, 6, 6]
    assert run(given(5), main) == (5 * 1.5 + 1.5 + 7 + 3 * 0.5, versions)
    assert run(given(5), main, recompute_kv=False) == (5 * 1.5 + 1.5 + 7, versions)
    # A response that begins as a sync pauses is all of the new version.
    main = partial(sampled_beside_sync, sample_at=4.0, sync_at=1.0)
    assert run(given(3), main)[1] == [6, 6, 6]


def test_lengths_end_at_the_limit() -> None:
    async def main(engine: SimulatedEngine, now: Now) -> tuple[Completion, ...]:
        return await engine.generate(PROMPT, replace(ONE, num_samples=2, max_tokens=4))

    cut, whole = run(given(9, 4), main)
    assert (len(cut.token_ids), cut.is_truncated) == (4, True)
    assert (len(whole.token_ids), whole.is_truncated) == (4, False)


def test_a_cancelled_group_leaves_its_place() -> None:
    async def main(engine: SimulatedEngine, now: Now) -> float:
        first = asyncio.ensure_future(engine.generate((), ONE))
        await asyncio.sleep(3.0)
        second = asyncio.ensure_future(engine.generate((), ONE))
        await asyncio.sleep(0)
        first.cancel()
        await second
        return now()

    assert run(given(100, 4), main, max_num_seqs=1) == 3 + 4 * 1.5


def test_a_dead_engine_fails_what_runs_and_all_that_follows() -> None:
    async def main(engine: SimulatedEngine, now: Now) -> float:
        with pytest.raises(EngineDied):
            await engine.generate(PROMPT, ONE)
        died_at = now()
        for call in (lambda: engine.generate(PROMPT, ONE), engine.pause, engine.load):
            with pytest.raises(EngineDied):
                await call()
        return died_at

    lives = [run(given(10**6), main, seed=s, speeds={"generator_life_s": 50.0}) for s in range(40)]
    assert lives[0] == run(given(10**6), main, seed=0, speeds={"generator_life_s": 50.0})
    assert 25 < np.mean(lives) < 100


def test_lengths_of_distributions() -> None:
    rng = np.random.default_rng(0)
    drawn = lognormal(mean=300.0, sigma=1.0)(rng, 100_000)
    assert np.mean(drawn) == pytest.approx(300, rel=0.02)
    assert np.median(drawn) == pytest.approx(300 * np.exp(-0.5), rel=0.02)
    assert set(lognormal(7.0, 0.0)(rng, 5)) == {7}
    assert set(recorded(np.array([3, 8]))(rng, 100)) == {3, 8}


def test_the_clock_jumps_from_timer_to_timer_and_goes_on_with_the_next_loop() -> None:
    clock, seen = VirtualClock(), []

    async def main() -> None:
        async def note(after_s: float) -> None:
            await asyncio.sleep(after_s)
            seen.append((after_s, await asyncio.to_thread(lambda: clock.now)))

        await asyncio.gather(note(86400.0 * 3), note(2.0), note(1.0))

    clock.run(main())
    assert seen == [(1.0, 1.0), (2.0, 2.0), (86400.0 * 3, 86400.0 * 3)]
    clock.run(asyncio.sleep(1.0))
    assert clock.now == 86400.0 * 3 + 1


def test_a_deadlock_is_an_error_and_one_in_a_thread_reaches_its_caller() -> None:
    async def main() -> None:
        with pytest.raises(OSError, match="full"):
            await asyncio.to_thread(Mock(side_effect=OSError("full")))
        await asyncio.sleep(4.0)
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match=r"after 4.0 virtual seconds"):
        VirtualClock().run(main())


@pytest.fixture(autouse=True)
def _no_warnings(recwarn: pytest.WarningsRecorder) -> Iterator[None]:
    yield
    assert [str(w.message) for w in recwarn if "never awaited" in str(w.message)] == []
