"""What does it cost to grade answers in processes that can be killed?

    python profiling/scoring.py [--pairs 4000] [--rounds 3]

Grades such answers in this process and in pools of one and two workers, as one large batch and in groups of
eight (as a Scorer does), in turn, and prints the fastest round's answers per second. No answer comes twice, so
no cache helps. Then the cost of a worker that is killed. The ratios hold; the rates are this machine's.
"""

import argparse
import time
from collections.abc import Callable, Sequence

from grpo_ray.rewards import get_reward_fn
from grpo_ray.rewards.pool import RewardPool, ScoringError

GROUP = 8
Pairs = list[tuple[str, str]]
KINDS: dict[str, Callable[[int], tuple[str, str]]] = {
    "exact": lambda n: (f"{n}", f"{n}"),
    "number": lambda n: (f"{n}.50", rf"\frac{{{2 * n + 1}}}{{2}}"),
    "LaTeX": lambda n: (rf"{n}\sqrt{{8}}", rf"{2 * n}\sqrt{{2}}"),
}


def make_pairs(kind: str, first: int, num_pairs: int) -> Pairs:
    """Right answers in the format, with some thought before."""
    answers = (KINDS[kind](n) for n in range(first, first + num_pairs))
    return [(f" {'so ' * 100}</think> <answer> {answer} </answer>", truth) for answer, truth in answers]


def seconds(grade: Callable[[Pairs], list], pairs: Pairs, size: int) -> float:
    started = time.perf_counter()
    for start in range(0, len(pairs), size):
        for result in grade(pairs[start : start + size]):
            assert not isinstance(result, ScoringError), result
            assert result["reward"] == 1, result
    return time.perf_counter() - started


def measure(pools: Sequence[RewardPool], num_pairs: int, num_rounds: int) -> None:
    reward_fn = get_reward_fn("r1_zero")
    ways: dict[str, tuple[Callable[[Pairs], list], int, int]] = {
        "in process": (lambda pairs: [reward_fn(*pair) for pair in pairs], num_pairs, 1)
    }
    for cores, pool in enumerate(pools, 1):
        ways[f"pool of {cores}"] = (lambda pairs, pool=pool: pool.grade("", pairs), num_pairs, cores)
        ways[f"pool of {cores}, in groups"] = (lambda pairs, pool=pool: pool.grade("", pairs), GROUP, cores)
    print(f"{'answers':10s}{'graded':22s}{'a second':>10s}{'a core':>10s}{'of in process':>15s}")
    first = 1
    for kind in KINDS:
        size = num_pairs if kind != "LaTeX" else num_pairs // 10
        best = dict.fromkeys(ways, float("inf"))
        for _ in range(num_rounds):
            for name, (grade, batch, _) in ways.items():
                best[name] = min(best[name], seconds(grade, make_pairs(kind, first, size), batch) / size)
                first += size
        for name, (_, _, cores) in ways.items():
            share = best["in process"] / best[name]
            print(f"{kind:10s}{name:22s}{1 / best[name]:10,.0f}{1 / best[name] / cores:10,.0f}{share:14.2f}x")


def measure_killed(pool: RewardPool, num_times: int = 50) -> None:
    """A function of a user's that ends its process, against one that does not."""
    costs = []
    for answer in ("", "end"):
        started = time.perf_counter()
        for _ in range(num_times):
            pool.grade("own", [(answer, "")])
        costs.append((time.perf_counter() - started) / num_times * 1e3)
    print(f"an answer alone takes {costs[0]:.2f} ms; with a worker that it ends {costs[1]:.2f} ms")


def end_if_told(response: str, ground_truth: str) -> float:
    if response == "end":
        import os

        os._exit(1)
    return 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--pairs", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rewards = {"": "r1_zero", "own": "scoring:end_if_told"}
    pools = [RewardPool(rewards, num_workers, timeout_s=30, memory_gib=1) for num_workers in (1, 2)]
    started = time.perf_counter()
    for pool in pools:
        pool.start()
    print(f"two pools started in {time.perf_counter() - started:.2f} s")
    measure(pools, options.pairs, options.rounds)
    measure_killed(pools[0])
    for pool in pools:
        pool.close()


if __name__ == "__main__":
    main()
