"""The cost of grading answers in processes that can be killed.

Answers are graded in this process and in pools of workers, as one large batch and in groups of eight (as in a
Scorer). Each answer is different, so caches do not help.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from benchmarks.results import Options, Row, take_turns
from grpo_ray.rewards import get_reward_fn
from grpo_ray.rewards.base import ScoringError
from grpo_ray.rewards.isolation.pool import RewardPool

TITLE = "grading in this process against pools of workers"
GROUP = 8
IN_PROCESS = "in process"
Pairs = list[tuple[str, str]]
KINDS: dict[str, Callable[[int], tuple[str, str]]] = {
    "equal as text": lambda n: (f"{n}", f"{n}"),
    "numbers": lambda n: (f"{n}.50", rf"\frac{{{2 * n + 1}}}{{2}}"),
    "algebra": lambda n: (rf"{n}\sqrt{{8}}", rf"{2 * n}\sqrt{{2}}"),
}


def run(options: Options) -> list[Row]:
    num_pairs, pool_sizes = (40, (1,)) if options.quick else (1500, (1, 2))
    rounds = options.rounds or (1 if options.quick else 5)
    with _started(pool_sizes) as pools:
        return [row for kind in KINDS for row in _measure(kind, pools, num_pairs, rounds)]


@contextlib.contextmanager
def _started(sizes: Sequence[int]) -> Iterator[list[RewardPool]]:
    pools = [RewardPool({"": "r1_zero"}, size, timeout_s=30, memory_gib=1) for size in sizes]
    try:
        for pool in pools:
            pool.start()
        yield pools
    finally:
        for pool in pools:
            pool.close()


def _measure(kind: str, pools: Sequence[RewardPool], num_pairs: int, rounds: int) -> list[Row]:
    reward_fn, fresh = get_reward_fn("r1_zero"), itertools.count(1)
    size = num_pairs if kind != "algebra" else max(GROUP, num_pairs // 10)
    ways: dict[str, tuple[Callable[[Pairs], list[Any]], int]] = {
        IN_PROCESS: (lambda pairs: [reward_fn(*pair) for pair in pairs], size)
    }
    for num_workers, pool in enumerate(pools, 1):

        def grade(pairs: Pairs, pool: RewardPool = pool) -> list[Any]:
            return pool.submit("", pairs).result()

        ways[f"pool of {num_workers}"] = grade, size
        ways[f"pool of {num_workers}, in groups"] = grade, GROUP

    def grade_all(way: str) -> None:
        grade, batch = ways[way]
        pairs = _make_pairs(kind, fresh, size)
        for start in range(0, size, batch):
            for result in grade(pairs[start : start + batch]):
                assert not isinstance(result, ScoringError), result
                assert result["reward"] == 1, result

    seconds = take_turns({way: partial(grade_all, way) for way in ways}, rounds)
    base = f"{kind}, {IN_PROCESS}"
    return [Row(f"{kind}, {way}", values, base, size, "answers") for way, values in seconds.items()]


def _make_pairs(kind: str, fresh: Iterator[int], num_pairs: int) -> Pairs:
    """Make right answers in the format, after some reasoning."""
    answers = (KINDS[kind](n) for n in itertools.islice(fresh, num_pairs))
    return [(f" {'so ' * 100}</think> <answer> {answer} </answer>", truth) for answer, truth in answers]
