"""KL estimates by hand, and their expectations and gradients under an exact small categorical."""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_ray.algorithms import KLEstimator, kl_estimate
from grpo_ray.config.algorithm import KLConfig

LOGITS = torch.tensor([0.3, -1.0, 0.8, 0.0], dtype=torch.float64)
REFERENCE = torch.log_softmax(torch.tensor([-0.5, 0.4, 0.1, 1.0], dtype=torch.float64), dim=0)


def exact_kl(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return (first.exp() * (first - second)).sum()


def test_estimates_by_hand():
    policy, reference = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])
    torch.testing.assert_close(kl_estimate(policy, reference, "k1"), torch.tensor([[0.5, -1.0]]))
    torch.testing.assert_close(kl_estimate(policy, reference, "k2"), torch.tensor([[0.125, 0.5]]))
    k3 = torch.tensor([[math.exp(-0.5) + 0.5 - 1, math.e - 1.0 - 1]])
    torch.testing.assert_close(kl_estimate(policy, reference, "k3"), k3)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_expect_the_kl_of_policy_against_reference(estimator):
    policy = torch.log_softmax(LOGITS, dim=0)
    expectation = (policy.exp() * kl_estimate(policy, REFERENCE, estimator)).sum()
    torch.testing.assert_close(expectation, exact_kl(policy, REFERENCE))
    assert expectation.item() != pytest.approx(exact_kl(REFERENCE, policy).item(), rel=0.01)


def test_k2_expects_the_kl_only_where_the_two_are_close():
    policy = torch.log_softmax(LOGITS, dim=0)
    close = torch.log_softmax(LOGITS + 1e-3 * REFERENCE, dim=0)
    for reference, is_close in ((close, True), (REFERENCE, False)):
        expectation = (policy.exp() * kl_estimate(policy, reference, "k2")).sum().item()
        assert (expectation == pytest.approx(exact_kl(policy, reference).item(), rel=0.01)) is is_close


def test_expected_gradients_are_what_the_docstring_says():
    """The samples' probabilities are held fixed, as in training; the gradient is by the logits."""

    def gradient(value):
        logits = LOGITS.clone().requires_grad_()
        return torch.autograd.grad(value(torch.log_softmax(logits, dim=0)), logits)[0]

    def as_loss(estimator):
        return gradient(
            lambda policy: (policy.detach().exp() * kl_estimate(policy, REFERENCE, estimator)).sum()
        )

    torch.testing.assert_close(as_loss("k1"), torch.zeros_like(LOGITS), atol=1e-12, rtol=0)
    torch.testing.assert_close(as_loss("k2"), gradient(lambda policy: exact_kl(policy, REFERENCE)))
    torch.testing.assert_close(as_loss("k3"), gradient(lambda policy: exact_kl(REFERENCE, policy)))


@pytest.mark.parametrize("estimator", get_args(KLEstimator))
def test_token_gradients_by_hand_and_against_finite_differences(estimator):
    policy = torch.tensor([[-1.0, -2.0, -0.3]], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([[-1.5, -1.0, -0.3]], dtype=torch.float64, requires_grad=True)
    kl_estimate(policy, reference, estimator).sum().backward()
    expected = {
        "k1": [1.0, 1.0, 1.0],
        "k2": [0.5, -1.0, 0.0],
        "k3": [1 - math.exp(-0.5), 1 - math.e, 0.0],
    }[estimator]
    torch.testing.assert_close(policy.grad, torch.tensor([expected], dtype=torch.float64))
    assert reference.grad is None
    fixed = reference.detach()
    assert torch.autograd.gradcheck(lambda new: kl_estimate(new, fixed, estimator), (policy,))


@settings(max_examples=200, deadline=None)
@given(policy=st.floats(-40, 0, width=32), difference=st.floats(-30, 30, width=32))
def test_k3_is_never_negative(policy, difference):
    log_probs = torch.tensor([[policy]])
    assert kl_estimate(log_probs, log_probs + difference, "k3").item() >= 0


@pytest.mark.parametrize("difference", [1e-4, -1e-4])
def test_k3_of_a_small_difference_is_accurate_in_float32(difference):
    zero = torch.zeros(1, 1)
    value = kl_estimate(zero, torch.full((1, 1), difference), "k3").item()
    assert value == pytest.approx(0.5e-8, rel=2e-3)  # exp(d) - d - 1 would be wrong in its first digit


def test_k3_never_overflows_and_never_pushes_the_policy_away():
    policy = torch.tensor([[-1e4, -torch.inf, -25.0, 0.0]], requires_grad=True)
    reference = torch.tensor([[0.0, -1.0, 0.0, -1e4]])
    value = kl_estimate(policy, reference, "k3")
    expected = torch.tensor([[math.exp(20) - 21] * 3 + [1e4 - 1]])
    torch.testing.assert_close(value, expected)
    value.sum().backward()
    # A positive gradient lowers the policy: right where it is above the reference, and only there.
    assert policy.grad.tolist() == [[0.0, 0.0, 0.0, 1.0]]


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"'k4'.*k1, k2, k3"):
        kl_estimate(torch.zeros(1, 1), torch.zeros(1, 1), "k4")
    with pytest.raises(ValueError, match="reference_log_probs"):
        kl_estimate(torch.zeros(2, 3), torch.zeros(1, 3), "k1")


def test_the_config_allows_the_same_estimators():
    assert get_args(KLConfig.model_fields["estimator"].annotation) == get_args(KLEstimator)
