"""Sequences, minibatches, and the layouts of micro-batches, by hand-made examples and properties."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from builders import make_completion, make_group, make_item
from hypothesis import given
from hypothesis import strategies as st

from grpo_ray.learning.attention import BlockAttention
from grpo_ray.learning.families import SegmentTree
from grpo_ray.learning.microbatch import MicroBatch, Pass, collate_packed, collate_padded, deal, imbalance
from grpo_ray.learning.sequences import NEVER, TrainSequence, minibatches, plan, sequences_of


def make_sequence(prompt: list[int], response: list[int], advantage: float = 0.0) -> TrainSequence:
    logprobs = -np.arange(1, len(response) + 1, dtype=np.float32)
    return TrainSequence(tuple(prompt), np.array(response, dtype=np.int32), logprobs, advantage)


def with_logprobs(sequence: TrainSequence, proximal: list[float], reference: list[float]) -> TrainSequence:
    arrays = (np.array(values, dtype=np.float32) for values in (proximal, reference))
    return replace(sequence, **dict(zip(("proximal_logprobs", "reference_logprobs"), arrays, strict=True)))


def two_sequences() -> list[TrainSequence]:
    long_prompt = replace(make_sequence([11, 12, 13], [14, 15], 0.5), versions=np.array([3, 4]))
    return [
        with_logprobs(long_prompt, proximal=[-0.5, -0.25], reference=[-7, -8]),
        with_logprobs(make_sequence([21], [22, 23, 24], -2.0), proximal=[-3, -4, -5], reference=[-9, -10, -11]),
    ]


def values_of(batch: MicroBatch) -> dict[str, object]:
    tensors = {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    assert dtypes.pop("response_mask") is torch.bool
    of_labels = {"labels", "sources", "places", "turn_places"}
    integers = {"input_ids", "position_ids", "switches", *of_labels} & dtypes.keys()
    assert {dtypes.pop(name) for name in integers} == {torch.int64}
    assert set(dtypes.values()) == {torch.float32}
    return {name: tensor.tolist() for name, tensor in tensors.items()}


def test_versions_of_a_sequence() -> None:
    for versions, switch in (([3], NEVER), ([3, 3], NEVER), ([3, 4], 1), ([0, 0, 2, 3], 2), ([], NEVER)):
        numbers, penalties = np.array(versions, dtype=np.int32), np.ones(len(versions), np.float32)
        sequence = replace(make_sequence([1], versions, 0.0), versions=numbers, token_penalties=penalties)
        assert sequence.switch == switch
        kept = sequence.before_any_update(3).token_penalties  # tokens of version 3 differ by rounding alone
        assert kept is not None
        assert kept.tolist() == [version != 3 for version in versions]


def test_two_sequences_of_different_shapes_padded() -> None:
    batch = collate_padded(two_sequences())
    assert batch.after_switch.tolist() == [[False, True, True], [False, False, False]]
    assert values_of(batch) == {
        "input_ids": [[11, 12, 13, 14, 15], [21, 22, 23, 24, 0]],
        "sources": [2, 3, 5, 6, 7],
        "labels": [14, 15, 22, 23, 24],
        "places": [0, 1, 3, 4, 5],
        "turn_places": [0, 1, 0, 1, 2],
        "response_mask": [[True, True, False], [True, True, True]],
        "behaviour_logprobs": [[-1.0, -2.0, 0.0], [-1.0, -2.0, -3.0]],
        "advantages": [[0.5], [-2.0]],
        "switches": [[1], [NEVER]],
        "proximal_logprobs": [[-0.5, -0.25, 0.0], [-3.0, -4.0, -5.0]],
        "reference_logprobs": [[-7.0, -8.0, 0.0], [-9.0, -10.0, -11.0]],
    }
    assert (batch.num_prompt_tokens, batch.num_padding_tokens) == (4, 1)


def test_two_prompts_and_three_responses_packed() -> None:
    first, second = two_sequences()
    sibling = with_logprobs(make_sequence([11, 12, 13], [16, 17, 18, 19]), [-1] * 4, [-2] * 4)
    trees: list[SegmentTree] = []

    def attention(tree: SegmentTree) -> BlockAttention:
        trees.append(tree)
        return BlockAttention.of(tree)

    batch = collate_packed([first, second, sibling], attention)
    assert trees == [SegmentTree((3, 4, 2, 4), (-1, 0, 0, -1))]
    assert batch.input_ids.tolist() == [[11, 12, 13, 16, 17, 18, 19, 14, 15, 21, 22, 23, 24]]
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 3, 4, 0, 1, 2, 3]]
    # The first token of a response is predicted at the end of its prompt.
    assert batch.sources.tolist() == [2, 7, 9, 10, 11, 2, 3, 4, 5]
    assert batch.labels.tolist() == [14, 15, 22, 23, 24, 16, 17, 18, 19]
    assert batch.places.tolist() == [0, 1, 4, 5, 6, 8, 9, 10, 11]
    assert (batch.num_prompt_tokens, batch.num_padding_tokens) == (4, 0)


def test_sequences_of_pairs_each_completion_with_its_own_advantage() -> None:
    first = make_group(make_item(0, [1]), [make_completion([5, 6]), make_completion([7])], [1, 0], [0.7, 0.0])
    second = make_group(make_item(1, [2, 3]), [make_completion([8], [-0.25])], [1], [0])
    sequences = sequences_of([first, second])
    pairs = [(s.prompt_token_ids, s.response_token_ids.tolist()) for s in sequences]
    assert pairs == [((1,), [5, 6]), ((1,), [7]), ((2, 3), [8])]
    assert [s.advantage for s in sequences] == pytest.approx([0.7, 0.0, 0.0])
    assert [s.has_signal for s in sequences] == [True, False, False]  # each by its own advantage
    assert sequences[2].behaviour_logprobs.tolist() == [-0.25]
    assert [len(s) for s in sequences] == [3, 2, 3]


def test_sequences_that_were_cut_off_can_be_left_out() -> None:
    cut, whole = make_completion([5, 6], finish_reason="length"), make_completion([7])
    second = make_group(make_item(1), [cut, cut], [1, 1], [1.0, -1.0])
    groups = [make_group(make_item(0), [cut, whole], [1, 0], [0.0, -0.7]), second]
    assert [len(s.response_token_ids) for s in sequences_of(groups)] == [2, 1, 2, 2]
    (kept,) = sequences_of(groups, mask_truncated=True)
    assert (kept.response_token_ids.tolist(), kept.has_signal) == ([7], True)
    assert kept.advantage == pytest.approx(-0.7)


@given(num_sequences=st.integers(1, 20), size=st.none() | st.integers(1, 25), num_epochs=st.integers(1, 4))
def test_every_epoch_has_each_sequence_once(num_sequences: int, size: int | None, num_epochs: int) -> None:
    sequences = [make_sequence([1], [place]) for place in range(num_sequences)]
    updates = minibatches(sequences, size, num_epochs, "7/3")
    shuffled = [[int(s.response_token_ids[0]) for s in update] for update in updates]
    whole = min(size or num_sequences, num_sequences)
    per_epoch = -(-num_sequences // whole)
    assert len(updates) == num_epochs * per_epoch
    for epoch in range(num_epochs):
        own = shuffled[epoch * per_epoch : (epoch + 1) * per_epoch]
        sizes = [len(update) for update in own]
        assert max(sizes) <= whole
        assert max(sizes) - min(sizes) <= 1  # no small remainder gets an update of its own
        assert sorted(place for update in own for place in update) == list(range(num_sequences))
    if per_epoch == 1:
        assert shuffled == [list(range(num_sequences))] * num_epochs  # nothing to shuffle


def test_shuffling_depends_on_the_seed_alone() -> None:
    sequences = [make_sequence([1], [place]) for place in range(8)]

    def shuffle(seed: str) -> list[list[int]]:
        return [[int(s.response_token_ids[0]) for s in update] for update in minibatches(sequences, 4, 2, seed)]

    assert shuffle("0/minibatches/0") == shuffle("0/minibatches/0")
    assert shuffle("0/minibatches/0") != shuffle("0/minibatches/1")
    assert shuffle("0/minibatches/0") != shuffle("1/minibatches/0")
    first, second = shuffle("0/minibatches/0")[:2], shuffle("0/minibatches/0")[2:]
    assert first != second  # each epoch is shuffled anew
    assert shuffle("0/minibatches/0")[0] == [5, 3, 2, 4]  # the same in every process


def test_too_long_sequence_goes_alone_and_others_fill_the_budget() -> None:
    sizes = [(2, 2), (2, 18), (2, 2), (2, 3), (2, 3)]
    sequences = [make_sequence([place] * p, [2] * r) for place, (p, r) in enumerate(sizes)]
    assert plan(sequences, 10, shares_prompts=False) == [[1], [3, 4], [0, 2]]
    assert plan(sequences, 10, shares_prompts=True) == [[1], [3, 4], [0, 2]]
    assert plan([], 10, shares_prompts=True) == plan([], 10, shares_prompts=False) == []


def test_whole_groups_are_packed_and_a_large_one_is_split() -> None:
    groups = [[3, 4, 5], [2, 2], [3]]
    first, second, third = ([make_sequence([p], [2] * n) for n in own] for p, own in enumerate(groups))
    sequences = [*second, *first, *third]  # with their prompts 5, 13 and 4 tokens
    assert plan(sequences, 22, shares_prompts=True) == [[4, 3, 2, 0, 1, 5]]
    assert plan(sequences, 18, shares_prompts=True) == [[4, 3, 2, 0, 1], [5]]
    assert plan(sequences, 10, shares_prompts=True) == [[4, 3], [2, 0, 1], [5]]
    assert plan(sequences, 1, shares_prompts=True) == [[4], [3], [2], [0], [1], [5]]


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40), num_ranks=st.integers(1, 6),
    max_tokens=st.integers(50, 200),
)  # fmt: skip
def test_sequences_are_dealt_once_in_equal_rounds(lengths: list[int], num_ranks: int, max_tokens: int) -> None:
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
