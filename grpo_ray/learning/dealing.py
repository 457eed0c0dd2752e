"""Micro-batches dealt to ranks, so that every rank does as many passes of about the same cost.

The ranks meet in every block of every pass, so the time of a round of passes is that of its costliest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Plan = Callable[[int], list[list[int]]]  # from the most tokens per micro-batch to the micro-batches' sequences


@dataclass(frozen=True)
class Pass:
    """One micro-batch: the indices of its sequences."""

    indices: list[int]
    counts: bool = True
    """False for a repetition that only keeps the ranks together: its loss is 0."""


def deal(plan: Plan, max_tokens: int, num_ranks: int, cost: Callable[[list[int]], float]) -> list[list[Pass]]:
    """Return each rank's passes, costliest first; all ranks have as many.

    Args:
        cost: of a pass on the sequences with these indices.
    """
    batches = _balanced(plan, max_tokens, num_ranks)
    if not batches:
        return [[] for _ in range(num_ranks)]
    _split_to(-(-len(batches) // num_ranks) * num_ranks, batches, cost)
    passes = [Pass(indices) for indices in sorted(batches, key=cost, reverse=True)]
    passes += [Pass(min(batches, key=cost), counts=False)] * (-len(passes) % num_ranks)
    rounds = [passes[first : first + num_ranks] for first in range(0, len(passes), num_ranks)]
    dealt = [each[::-1] if number % 2 else each for number, each in enumerate(rounds)]
    return [list(of_rank) for of_rank in zip(*dealt, strict=True)]


def imbalance(dealt: Sequence[Sequence[Pass]], cost: Callable[[list[int]], float]) -> float:
    """Return the time that the costliest passes of the rounds take, over that of equal ones: 1 is even."""
    costs = [[cost(each.indices) if each.counts else 0.0 for each in passes] for passes in dealt]
    rounds = list(zip(*costs, strict=True))
    useful = sum(map(sum, rounds)) / len(dealt)
    return sum(map(max, rounds)) / useful if useful else 1.0


def _balanced(plan: Plan, max_tokens: int, num_ranks: int) -> list[list[int]]:
    """Plan with the smallest micro-batches that need no more rounds than those of `max_tokens`."""
    best = plan(max_tokens)
    most = -(-len(best) // num_ranks) * num_ranks
    low, high = 0, max_tokens  # too small, small enough
    while high - low > max(1, max_tokens // 64):
        middle = (low + high) // 2
        planned = plan(middle)
        if len(planned) > most:
            low = middle
        else:
            high, best = middle, planned
    return best


def _split_to(number: int, batches: list[list[int]], cost: Callable[[list[int]], float]) -> None:
    """Split the costliest batches in two until there are `number`, or each has one sequence."""
    while len(batches) < number:
        several = [batch for batch in batches if len(batch) > 1]
        if not several:
            return
        costliest = max(several, key=cost)
        batches.remove(costliest)
        middle = len(costliest) // 2
        batches += [costliest[:middle], costliest[middle:]]
