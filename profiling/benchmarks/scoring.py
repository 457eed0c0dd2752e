"""The cost of grading answers in processes that can be killed.

Answers are graded in this process and in pools of workers, as one large batch and in groups of eight (as in a
Scorer). Each answer is different, so caches do not help.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence

from benchmarks.results import Options, Row, take_turns
from grpo_ray.rewards import get_reward_fn
from grpo_ray.rewards.base import ScoringError
from grpo_ray.rewards.isolation.pool import RewardPool

TITLE = "grading in this process against pools of workers, and a worker that is killed"
GROUP = 8
KILLED_IN_A_ROW = 10
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
        rows = [row for kind in KINDS for row in _measure(kind, pools, num_pairs, rounds)]
        return [*rows, *_measure_killed(pools[0], 1 if options.quick else 5)]


@contextlib.contextmanager
def _started(sizes: Sequence[int]) -> Iterator[list[RewardPool]]:
    rewards = {"": "r1_zero", "own": "benchmarks.scoring:end_if_told"}
    pools = [RewardPool(rewards, size, timeout_s=30, memory_gib=1) for size in sizes]
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
    ways: dict[str, tuple[Callable[[Pairs], list], int]] = {
        IN_PROCESS: (lambda pairs: [reward_fn(*pair) for pair in pairs], size)
    }
    for num_workers, pool in enumerate(pools, 1):
        grade: Callable[[Pairs], list] = lambda pairs, pool=pool: pool.grade("", pairs)  # noqa: E731
        ways[f"pool of {num_workers}"] = grade, size
        ways[f"pool of {num_workers}, in groups"] = grade, GROUP

    def grade_all(way: str) -> None:
        grade, batch = ways[way]
        pairs = _make_pairs(kind, fresh, size)
        for start in range(0, size, batch):
            for result in grade(pairs[start : start + batch]):
                assert not isinstance(result, ScoringError), result
                assert result["reward"] == 1, result

    seconds = take_turns({way: (lambda way=way: grade_all(way)) for way in ways}, rounds)
    base = f"{kind}, {IN_PROCESS}"
    return [Row(f"{kind}, {way}", values, base, size, "answers") for way, values in seconds.items()]


def _make_pairs(kind: str, fresh: Iterator[int], num_pairs: int) -> Pairs:
    """Make right answers in the format, after some reasoning."""
    answers = (KINDS[kind](n) for n in itertools.islice(fresh, num_pairs))
    return [(f" {'so ' * 100}</think> <answer> {answer} </answer>", truth) for answer, truth in answers]


def _measure_killed(pool: RewardPool, num_times: int) -> list[Row]:
    """Measure a user's function that ends its process against one that does not.

    There are several calls in a row, so that each waits for the worker that replaces the previous one.
    """

    def grade(answer: str) -> None:
        for _ in range(KILLED_IN_A_ROW):
            pool.grade("own", [(answer, "")])

    alone, ends = f"{KILLED_IN_A_ROW} answers, one by one", f"{KILLED_IN_A_ROW} answers that end their worker"
    seconds: dict[str, list[float]] = {alone: [], ends: []}
    for _ in range(num_times):
        pool.grade("own", [("", "")])  # the worker is there again
        for name, answer in ((alone, ""), (ends, "end")):
            started = time.perf_counter()
            grade(answer)
            seconds[name].append(time.perf_counter() - started)
    return [Row(name, tuple(values), alone, KILLED_IN_A_ROW, "answers") for name, values in seconds.items()]


def end_if_told(response: str, ground_truth: str) -> float:
    if response == "end":
        import os

        os._exit(1)
    return 1.0
