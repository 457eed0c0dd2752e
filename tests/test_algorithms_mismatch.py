"""The sampler-Learner mismatch by hand, and that it accumulates."""

import math

import pytest
import torch

from grpo_ray.algorithms import logprob_mismatch


def test_mismatch_by_hand():
    learner = torch.tensor([[-1.0, -2.0, -5.0], [-1.0, -1.0, -1.0]])
    behaviour = torch.tensor([[-1.5, -1.0, -9.0], [-1.0, float("-inf"), float("nan")]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    result = logprob_mismatch(learner, behaviour, mask)
    kl = (math.exp(0.5) - 1 - 0.5) + (math.exp(-1.0) - 1 + 1.0)
    assert result["kl_sum"].item() == pytest.approx(kl, rel=1e-12)
    assert result["abs_diff_sum"].item() == 1.5
    assert result["abs_diff_max"].item() == 1.0
    assert result["num_tokens"].item() == 3


def test_kl_is_of_behaviour_against_learner():
    """Weighted by the behaviour's probabilities, k3 sums to KL(behaviour || learner) exactly."""
    behaviour = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    learner = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    kl = 0.0
    for token in range(3):
        pair = (learner[token].log().view(1, 1), behaviour[token].log().view(1, 1))
        kl += behaviour[token].item() * logprob_mismatch(*pair, torch.ones(1, 1))["kl_sum"].item()
    exact = (behaviour * (behaviour / learner).log()).sum().item()
    reverse = (learner * (learner / behaviour).log()).sum().item()
    assert kl == pytest.approx(exact)
    assert kl != pytest.approx(reverse, rel=0.01)


def test_a_tiny_difference_is_not_lost_to_rounding():
    behaviour = torch.full((1, 4), -1.0, dtype=torch.float64)
    result = logprob_mismatch(behaviour + 1e-6, behaviour, torch.ones(1, 4))
    assert result["kl_sum"].item() == pytest.approx(4 * 0.5e-12, rel=1e-3)  # d^2 / 2 a token
    assert result["kl_sum"].dtype == torch.float64


def test_sums_and_maximum_accumulate_over_micro_batches():
    generator = torch.Generator().manual_seed(0)
    learner, behaviour = -torch.rand(2, 6, 4, generator=generator)
    mask = torch.rand(6, 4, generator=generator) < 0.6
    whole = logprob_mismatch(learner, behaviour, mask)
    parts = [
        logprob_mismatch(*rows)
        for rows in zip(learner.split(2), behaviour.split(2), mask.split(2), strict=True)
    ]
    assert 0 < whole["num_tokens"].item() < 24
    for name in ("kl_sum", "abs_diff_sum", "num_tokens"):
        assert sum(part[name].item() for part in parts) == pytest.approx(whole[name].item())
    assert max(part["abs_diff_max"].item() for part in parts) == whole["abs_diff_max"].item()


def test_masked_out_nan_of_the_learner_and_an_empty_mask_give_zero():
    learner = torch.full((1, 2), float("nan"), requires_grad=True)
    result = logprob_mismatch(learner, torch.zeros(1, 2), torch.zeros(1, 2))
    assert {name: value.item() for name, value in result.items()} == {
        "kl_sum": 0.0,
        "abs_diff_sum": 0.0,
        "abs_diff_max": 0.0,
        "num_tokens": 0,
    }
    assert not any(value.requires_grad for value in result.values())


def test_nan_of_the_learner_at_a_live_token_is_not_hidden():
    result = logprob_mismatch(torch.full((1, 1), float("nan")), torch.zeros(1, 1), torch.ones(1, 1))
    assert math.isnan(result["kl_sum"].item())
