"""Masked reductions by hand, and the invariances of the batch's loss."""

from typing import get_args

import pytest
import torch

from grpo_ray.objectives import Aggregation, aggregate_loss, loss_denominator, masked_mean, masked_normalize

AGGREGATIONS = [name for name in get_args(Aggregation) if name != "prompt_mean"]  # that needs row_tokens

# The length-normalisation example: two responses, of 4 and 7 tokens, with the same advantage.
ADVANTAGES = torch.tensor([[2.0], [2.0]])
LENGTHS_MASK = torch.tensor([[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]], dtype=torch.bool)


def test_masked_mean_by_hand():
    tensor = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    mask = torch.tensor([[True, False, True], [False, False, True]])
    assert masked_mean(tensor, mask).item() == pytest.approx(10 / 3)
    assert masked_mean(tensor, mask, dim=1).tolist() == [2.0, 6.0]
    torch.testing.assert_close(
        masked_mean(tensor, mask, dim=0), torch.tensor([1.0, torch.nan, 4.5]), equal_nan=True
    )


def test_masked_normalize_by_hand():
    tensor = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    mask = torch.tensor([[1, 0, 1], [0, 0, 1]])
    assert masked_normalize(tensor, mask, constant_normalizer=4.0).item() == 2.5
    assert masked_normalize(tensor, mask, dim=1, constant_normalizer=2.0).tolist() == [2.0, 3.0]
    assert masked_normalize(tensor, mask, dim=0).tolist() == [1.0, 0.0, 9.0]


def test_length_normalisation_with_masked_mean():
    ratio = torch.ones(2, 7, requires_grad=True)
    per_sequence = masked_mean(ratio * ADVANTAGES, LENGTHS_MASK, dim=1)
    assert per_sequence.tolist() == [2.0, 2.0]
    per_sequence.mean().backward()
    # A / length / 2 sequences: a token of the short response has more weight.
    expected = torch.tensor([[2 / 4 / 2] * 4 + [0.0] * 3, [2 / 7 / 2] * 7])  # 0.25 and 0.1429
    torch.testing.assert_close(ratio.grad, expected)


def test_length_normalisation_with_a_constant():
    ratio = torch.ones(2, 7, requires_grad=True)
    per_sequence = masked_normalize(ratio * ADVANTAGES, LENGTHS_MASK, dim=1, constant_normalizer=7)
    torch.testing.assert_close(per_sequence, torch.tensor([1.1429, 2.0]), atol=1e-4, rtol=0)
    per_sequence.mean().backward()
    expected = torch.tensor([[2 / 7 / 2] * 4 + [0.0] * 3, [2 / 7 / 2] * 7])  # every live token 0.1429
    torch.testing.assert_close(ratio.grad, expected)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_masked_out_poison_does_not_leak(poison):
    tensor = torch.tensor([[1.0, poison], [3.0, 5.0]], requires_grad=True)
    mask = torch.tensor([[True, False], [True, True]])
    results = [masked_mean(tensor, mask), masked_normalize(tensor, mask)]
    results += [aggregate_loss(tensor, mask, aggregation, 1.0) for aggregation in AGGREGATIONS]
    assert [result.item() for result in results] == [3.0, 9.0, 5.0, 9.0, 9.0, 9.0]
    torch.stack(results).sum().backward()
    # 1/3 + 1 + (1 or 1/2) + 1 + 1 + 1 at the live tokens, exactly 0 at the poisoned one
    torch.testing.assert_close(tensor.grad, torch.tensor([[16 / 3, 0.0], [29 / 6, 29 / 6]]))


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("sequence_mean", (1.5 + 6.0) / 2),
        ("token_mean", (1.0 + 2.0 + 6.0) / 3),
        ("constant", (1.0 + 2.0 + 6.0) / (2 * 4)),
        ("sequence_sum", (1.0 + 2.0 + 6.0) / 2),
    ],
)
def test_aggregation_by_hand(aggregation, expected):
    per_token_loss = torch.tensor([[1.0, 2.0, 9.0], [6.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    denominator = loss_denominator(aggregation, num_sequences=2, num_tokens=3, max_tokens=4)
    assert aggregate_loss(per_token_loss, mask, aggregation, denominator).item() == pytest.approx(expected)


@pytest.mark.parametrize("denominator", [0.0, -1.0, float("nan")])
def test_a_denominator_that_cannot_be_a_count_is_refused(denominator):
    with pytest.raises(ValueError, match="denominator"):
        aggregate_loss(torch.ones(1, 1), torch.ones(1, 1), "token_mean", denominator)


def test_an_unknown_aggregation_lists_the_allowed():
    with pytest.raises(ValueError, match=r"'mean'.*sequence_mean, token_mean, constant"):
        aggregate_loss(torch.ones(1, 1), torch.ones(1, 1), "mean", 1.0)
    with pytest.raises(ValueError, match=r"'mean'.*sequence_mean, token_mean, constant"):
        loss_denominator("mean", 1, 1, 1)


@pytest.mark.parametrize("aggregation", ["sequence_mean", "prompt_mean"])
def test_rows_of_one_response_or_prompt_are_one_mean_by_hand(aggregation: Aggregation) -> None:
    """A response (or prompt) of two rows with 1 and 3 tokens, and one of a single row with 2."""
    loss = torch.tensor([[4.0, 9.0, 9.0], [1.0, 2.0, 3.0], [6.0, 8.0, 9.0]])
    mask = torch.tensor([[1, 0, 0], [1, 1, 1], [1, 1, 0]])
    row_tokens = torch.tensor([4, 4, 2])
    denominator = loss_denominator(aggregation, 2, 6, max_tokens=4, num_prompts=2)
    whole = aggregate_loss(loss, mask, aggregation, denominator, row_tokens)
    assert whole.item() == pytest.approx(((4 + 1 + 2 + 3) / 4 + (6 + 8) / 2) / 2)
    parts = [
        aggregate_loss(*rows, aggregation, denominator, n)
        for *rows, n in zip(loss.split(1), mask.split(1), row_tokens.split(1), strict=True)
    ]
    assert sum(parts).item() == pytest.approx(whole.item())
    with pytest.raises(ValueError, match="prompt_mean needs row_tokens"):
        aggregate_loss(loss, mask, "prompt_mean", denominator)
