"""The deal of micro-batches to ranks: each sequence once, and as many passes for each rank."""

from hypothesis import given
from hypothesis import strategies as st

from grpo_ray.learning.dealing import Pass, deal, imbalance


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40), num_ranks=st.integers(1, 6),
    max_tokens=st.integers(50, 200),
)  # fmt: skip
def test_each_sequence_is_dealt_once_and_ranks_have_as_many_passes(
    lengths: list[int], num_ranks: int, max_tokens: int
) -> None:
    def cost(indices: list[int]) -> int:
        return sum(lengths[index] for index in indices)

    def plan(most: int) -> list[list[int]]:
        batches: list[list[int]] = []
        for index, length in enumerate(lengths):
            if not batches or cost(batches[-1]) + length > most:
                batches.append([])
            batches[-1].append(index)
        return batches

    dealt = deal(plan, max_tokens, num_ranks, cost)
    passes = [each for of_rank in dealt for each in of_rank]
    counted = [each.indices for each in passes if each.counts]
    assert sorted(index for indices in counted for index in indices) == list(range(len(lengths)))
    assert {len(of_rank) for of_rank in dealt} == {len(passes) // num_ranks}
    assert len(passes) // num_ranks == -(-len(plan(max_tokens)) // num_ranks)  # no more rounds than need be
    assert all(0 < cost(indices) <= max_tokens for indices in counted)
    if len(counted) < len(passes):  # something is repeated, as nothing is left to split
        assert all(len(indices) == 1 for indices in counted)
    assert imbalance(dealt, cost) >= 1 - 1e-9


def test_a_deal_by_hand() -> None:
    """Four batches of the costs 8, 6, 4, 2 in two rounds: the rank that has the costliest has the cheapest."""
    costs = {0: 8, 1: 6, 2: 4, 3: 2}
    dealt = deal(lambda _: [[0], [1], [2], [3]], 10, 2, lambda indices: costs[indices[0]])
    assert dealt == [[Pass([0]), Pass([3])], [Pass([1]), Pass([2])]]
    assert imbalance(dealt, lambda indices: costs[indices[0]]) == (8 + 4) / 10
    assert deal(lambda _: [], 10, 2, len) == [[], []]
