"""Padded micro-batches, and logprobs that do not depend on the padding."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import make_completion, make_group, make_item, plain_logprobs
from hypothesis import given
from hypothesis import strategies as st

from grpo_ray.algorithms import token_log_probs
from grpo_ray.policy.loading import load_policy
from grpo_ray.policy.microbatch import TrainSequence, collate, micro_batches, minibatches, sequences_of
from grpo_ray.policy.response_logits import response_logits


def make_sequence(prompt: list[int], response: list[int], advantage: float = 0.0) -> TrainSequence:
    logprobs = -np.arange(1, len(response) + 1, dtype=np.float32)
    return TrainSequence(tuple(prompt), np.array(response, dtype=np.int32), logprobs, advantage)


def with_logprobs(sequence: TrainSequence, proximal: list[float], reference: list[float]) -> TrainSequence:
    arrays = (np.array(values, dtype=np.float32) for values in (proximal, reference))
    return replace(sequence, **dict(zip(("proximal_logprobs", "reference_logprobs"), arrays, strict=True)))


# ---- collate ----


def test_collate_two_sequences_of_different_shapes() -> None:
    long_prompt, long_response = (
        make_sequence([11, 12, 13], [14, 15], 0.5),
        make_sequence([21], [22, 23, 24], -2.0),
    )
    first = with_logprobs(long_prompt, proximal=[-0.5, -0.25], reference=[-7, -8])
    second = with_logprobs(long_response, proximal=[-3, -4, -5], reference=[-9, -10, -11])
    batch = collate([first, second])
    no = False
    expected = {
        "input_ids": [[11, 12, 13, 14, 15], [21, 22, 23, 24, 0]],
        # from position 1, where the shorter prompt ends
        "labels": [[12, 13, 14, 15], [22, 23, 24, 0]],
        "response_mask": [[no, no, True, True], [True, True, True, no]],
        "response_position": [[-1, -1, 0, 1], [0, 1, 2, -1]],
        "behaviour_logprobs": [[0.0, 0.0, -1.0, -2.0], [-1.0, -2.0, -3.0, 0.0]],
        "advantages": [[0.5], [-2.0]],
        "proximal_logprobs": [[0.0, 0.0, -0.5, -0.25], [-3.0, -4.0, -5.0, 0.0]],
        "reference_logprobs": [[0.0, 0.0, -7.0, -8.0], [-9.0, -10.0, -11.0, 0.0]],
    }
    assert {name: tensor.tolist() for name, tensor in vars(batch).items()} == expected
    dtypes = {name: tensor.dtype for name, tensor in vars(batch).items()}
    assert dtypes.pop("response_mask") is torch.bool
    assert {dtypes.pop(name) for name in ("input_ids", "labels", "response_position")} == {torch.int64}
    assert set(dtypes.values()) == {torch.float32}


def test_logprobs_that_were_not_computed_are_none() -> None:
    sequence = make_sequence([11], [14, 15])
    batch = collate([sequence])
    assert (batch.proximal_logprobs, batch.reference_logprobs) == (None, None)
    moved = batch.to(torch.device("cpu"))
    assert (moved.proximal_logprobs, moved.reference_logprobs) == (None, None)
    assert torch.equal(moved.input_ids, batch.input_ids)


def test_sequences_of_pairs_each_completion_with_its_own_advantage() -> None:
    first = make_group(make_item(0, [1]), [make_completion([5, 6]), make_completion([7])], [1, 0], [0.7, -0.7])
    second = make_group(make_item(1, [2, 3]), [make_completion([8], [-0.25])], [1], [0])
    sequences = sequences_of([first, second])
    assert [(s.prompt_token_ids, s.response_token_ids.tolist()) for s in sequences] == [
        ((1,), [5, 6]),
        ((1,), [7]),
        ((2, 3), [8]),
    ]
    assert [s.advantage for s in sequences] == pytest.approx([0.7, -0.7, 0.0])
    assert [s.has_signal for s in sequences] == [
        True,
        True,
        False,
    ]  # per group: one non-zero advantage is enough
    assert sequences[2].behaviour_logprobs.tolist() == [-0.25]
    assert [len(s) for s in sequences] == [3, 2, 3]


def test_sequences_that_were_cut_off_can_be_left_out() -> None:
    cut, whole = make_completion([5, 6], finish_reason="length"), make_completion([7])
    groups = [
        make_group(make_item(0), [cut, whole], [1, 0], [0.0, -0.7]),
        make_group(make_item(1), [cut, cut], [1, 1], [1.0, -1.0]),
    ]
    assert [len(s.response_token_ids) for s in sequences_of(groups)] == [2, 1, 2, 2]
    (kept,) = sequences_of(groups, mask_truncated=True)
    assert (kept.response_token_ids.tolist(), kept.has_signal) == ([7], True)
    assert kept.advantage == pytest.approx(-0.7)


# ---- minibatches ----


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
        shuffled = minibatches(sequences, 4, 2, seed)
        return [[int(s.response_token_ids[0]) for s in update] for update in shuffled]

    assert shuffle("0/minibatches/0") == shuffle("0/minibatches/0")
    assert shuffle("0/minibatches/0") != shuffle("0/minibatches/1")
    assert shuffle("0/minibatches/0") != shuffle("1/minibatches/0")
    first, second = shuffle("0/minibatches/0")[:2], shuffle("0/minibatches/0")[2:]
    assert first != second  # each epoch is shuffled anew
    assert shuffle("0/minibatches/0")[0] == [5, 3, 2, 4]  # the same in every process


# ---- micro_batches ----


@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), max_size=30), budget=st.integers(1, 60)
)
def test_micro_batches_hold_every_sequence_once_within_the_budget(
    lengths: list[tuple[int, int]], budget: int
) -> None:
    # the first response token identifies the sequence
    sequences = [make_sequence([7] * p, [100 + i] + [8] * (r - 1)) for i, (p, r) in enumerate(lengths)]
    seen = []
    for indices, batch in micro_batches(sequences, budget):
        rows, width = batch.input_ids.shape
        assert rows * width <= budget or rows == 1
        assert batch.labels[batch.response_position == 0].tolist() == [100 + index for index in indices]
        seen += indices
    assert sorted(seen) == list(range(len(lengths)))


def test_too_long_sequence_goes_alone_and_others_fill_the_budget() -> None:
    sizes = [(2, 2), (2, 18), (2, 2), (2, 3), (2, 3)]
    batches = [b for _, b in micro_batches([make_sequence([1] * p, [2] * r) for p, r in sizes], 10)]
    assert [tuple(batch.input_ids.shape) for batch in batches] == [(1, 20), (2, 5), (2, 4)]
    assert list(micro_batches([], 10)) == []


# ---- logprobs ----


@pytest.mark.parametrize(("temperature", "min_tokens"), [(1.0, 0), (0.7, 0), (1.0, 3), (0.7, 3)])
@pytest.mark.parametrize("tied", [True, False])
def test_padded_logprobs_are_those_of_each_sequence_alone(
    tiny_model: Callable[..., Path], tied: bool, temperature: float, min_tokens: int
) -> None:
    model = load_policy(str(tiny_model(tied)))
    rng = np.random.default_rng(0)
    shapes = [(3, 9), (11, 2), (6, 6), (1, 1), (4, 14)]
    sequences = [make_sequence(*(rng.integers(1, 280, n).tolist() for n in shape)) for shape in shapes]
    ends = (0, 17)
    batch = collate(sequences)
    with torch.no_grad():
        logits = response_logits(model, batch, temperature, min_tokens, ends)
        logprobs = token_log_probs(logits, batch.labels)
        for row, s in enumerate(sequences):
            expected = plain_logprobs(
                model, s.prompt_token_ids, s.response_token_ids, temperature, min_tokens, ends
            )
            assert expected.isfinite().all()
            torch.testing.assert_close(logprobs[row][batch.response_mask[row]], expected, atol=1e-5, rtol=0)


def test_end_tokens_are_ruled_out_before_min_tokens_only(tiny_model: Callable[..., Path]) -> None:
    model = load_policy(str(tiny_model()))
    batch = collate([make_sequence([5, 6, 7], [8, 9, 10, 11])])
    ends = (0, 17)
    with torch.no_grad():
        free = response_logits(model, batch, 1.0, 0, ends)[0]
        held = response_logits(model, batch, 1.0, 2, ends)[0]
    probabilities = held.softmax(-1)[:, list(ends)]  # [4, 2]
    assert (probabilities[:2] == 0).all()
    assert (probabilities[2:] > 0).all()
    others = [token for token in range(held.shape[1]) if token not in ends]
    assert torch.equal(held[:, others], free[:, others])
    assert torch.equal(held[2:], free[2:])
