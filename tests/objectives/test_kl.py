"""KL estimates at the limits of floats, and the mismatch of sampler and Learner by hand.

The estimates are compared with slow loops in test_algorithm_combinations.py.
"""

import math

import pytest
import torch

from grpo_ray.objectives import kl_estimate
from grpo_ray.objectives.kl import logprob_mismatch


@pytest.mark.parametrize("difference", [1e-4, -1e-4])
def test_k3_of_a_small_difference_is_accurate_in_float32(difference):
    zero = torch.zeros(1, 1)
    value = kl_estimate(zero, torch.full((1, 1), difference), "k3").item()
    assert value == pytest.approx(0.5e-8, rel=2e-3)  # exp(d) - d - 1 would be wrong in the first digit


def test_k3_never_overflows_and_never_pushes_the_policy_away():
    policy = torch.tensor([[-1e4, -torch.inf, -25.0, 0.0]], requires_grad=True)
    reference = torch.tensor([[0.0, -1.0, 0.0, -1e4]])
    value = kl_estimate(policy, reference, "k3")
    expected = torch.tensor([[math.exp(20) - 21] * 3 + [1e4 - 1]])
    torch.testing.assert_close(value, expected)
    value.sum().backward()
    # A positive gradient lowers the policy: correct exactly where it is above the reference.
    assert policy.grad.tolist() == [[0.0, 0.0, 0.0, 1.0]]


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"'k4'.*k1, k2, k3"):
        kl_estimate(torch.zeros(1, 1), torch.zeros(1, 1), "k4")
    with pytest.raises(ValueError, match="reference_log_probs"):
        kl_estimate(torch.zeros(2, 3), torch.zeros(1, 3), "k1")
    with pytest.raises(ValueError, match="`unbiased` needs old_log_probs"):
        kl_estimate(torch.zeros(1, 1), torch.zeros(1, 1), "unbiased")


# ---- the mismatch of sampler and Learner ----


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


def test_nan_of_the_learner_is_hidden_outside_the_mask_alone_and_an_empty_mask_gives_zero():
    learner = torch.full((1, 2), float("nan"), requires_grad=True)
    result = logprob_mismatch(learner, torch.zeros(1, 2), torch.zeros(1, 2))
    assert {name: value.item() for name, value in result.items()} == {
        "kl_sum": 0.0,
        "abs_diff_sum": 0.0,
        "abs_diff_max": 0.0,
        "num_tokens": 0,
    }
    assert not any(value.requires_grad for value in result.values())
    assert logprob_mismatch(learner, torch.zeros(1, 2), torch.ones(1, 2))["kl_sum"].isnan()
