"""KL estimates and the sampler-Learner mismatch: by hand, and in expectation over a small categorical."""

import math

import pytest
import torch

from grpo_ray.objectives import kl_estimate
from grpo_ray.objectives.kl import logprob_mismatch

LOGITS = torch.tensor([0.3, -1.0, 0.8, 0.0], dtype=torch.float64)
REFERENCE = torch.log_softmax(torch.tensor([-0.5, 0.4, 0.1, 1.0], dtype=torch.float64), dim=0)


def test_estimates_by_hand():
    policy, reference = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])
    torch.testing.assert_close(kl_estimate(policy, reference, "k1"), torch.tensor([[0.5, -1.0]]))
    torch.testing.assert_close(kl_estimate(policy, reference, "k2"), torch.tensor([[0.125, 0.5]]))
    k3 = torch.tensor([[math.exp(-0.5) + 0.5 - 1, math.e - 1.0 - 1]])
    torch.testing.assert_close(kl_estimate(policy, reference, "k3"), k3)


def test_straight_through_has_the_value_of_one_and_the_gradient_of_k2():
    for estimator in ("k1", "k3"):
        policy = torch.tensor([[-1.0, -2.0, -0.3]], dtype=torch.float64, requires_grad=True)
        reference = torch.tensor([[-1.5, -1.0, -0.3]], dtype=torch.float64)
        value = kl_estimate(policy, reference, f"{estimator}+")
        torch.testing.assert_close(value, kl_estimate(policy, reference, estimator), rtol=0, atol=1e-15)
        value.sum().backward()
        torch.testing.assert_close(policy.grad, torch.tensor([[0.5, -1.0, 0.0]], dtype=torch.float64))


def test_unbiased_without_old_log_probabilities_is_refused():
    with pytest.raises(ValueError, match="`unbiased` needs old_log_probs"):
        kl_estimate(LOGITS, REFERENCE, "unbiased")
    with pytest.raises(ValueError, match="old_log_probs has shape"):
        kl_estimate(LOGITS, REFERENCE, "unbiased", LOGITS[:1])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "unbiased"])
def test_token_gradients_by_hand_and_against_finite_differences(estimator):
    policy = torch.tensor([[-1.0, -2.0, -0.3]], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([[-1.5, -1.0, -0.3]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1.0, -1.0, -0.3]], dtype=torch.float64)
    kl_estimate(policy, reference, estimator, old).sum().backward()
    expected = {
        # r * k3 + r * (1 - e^d) with d = -0.5, 1, 0 and r = 1, 1/e, 1
        "unbiased": [0.5, -math.exp(-1), 0.0],
        "k1": [1.0, 1.0, 1.0],
        "k2": [0.5, -1.0, 0.0],
        "k3": [1 - math.exp(-0.5), 1 - math.e, 0.0],
    }[estimator]
    torch.testing.assert_close(policy.grad, torch.tensor([expected], dtype=torch.float64))
    assert reference.grad is None
    fixed = reference.detach()
    assert torch.autograd.gradcheck(lambda new: kl_estimate(new, fixed, estimator, old), (policy,))


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
    assert logprob_mismatch(*3 * [torch.zeros(1, 0)]) == result
    assert logprob_mismatch(learner, torch.zeros(1, 2), torch.ones(1, 2))["kl_sum"].isnan()
