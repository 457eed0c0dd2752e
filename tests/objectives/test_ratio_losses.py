"""Clip-higher, dual clip, unclipped, GSPO and CISPO by hand, and at their bounds."""

import math

import pytest
import torch

from grpo_ray.config.algorithm import AlgorithmConfig
from grpo_ray.objectives import (
    Objective,
    compute_grpo_clip_loss,
    compute_policy_gradient_loss,
    policy_gradient_step,
)

LOW, HIGH, DUAL = 0.2, 0.5, 2.0
CLIPS = ["grpo_clip", "dual_clip", "gspo"]
RATIO_LOSSES = ["unclipped", "grpo_clip", "dual_clip", "gspo", "cispo"]


def ratio_loss(name, advantages, policy, old, mask=None):
    """Compute one of the losses with bounds 0.8 and 1.5, and a dual clip of 2 in `dual_clip`."""
    if name in ("grpo_clip", "dual_clip"):
        return compute_grpo_clip_loss(advantages, policy, old, LOW, HIGH, DUAL if name == "dual_clip" else None)
    mask = torch.ones_like(policy) if mask is None else mask
    return compute_policy_gradient_loss(policy, name, None, advantages, old, LOW, mask, HIGH)


def one_token(name, ratio, advantage):
    """Return loss, its derivative by the policy's log-probability, and `clipped`, at log pi = -1."""
    policy = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    old = policy.detach() - math.log(ratio)
    loss, details = ratio_loss(name, torch.tensor([[advantage]], dtype=torch.float64), policy, old)
    loss.sum().backward()
    assert details["ratio"].item() == pytest.approx(ratio)
    return loss.item(), policy.grad.item(), bool(details["clipped"].item())


@pytest.mark.parametrize(
    ("names", "ratio", "advantage", "loss", "gradient", "is_clipped"),
    [
        (CLIPS, 1.4, 1.0, -1.4, -1.4, False),  # above 1 + low, below 1 + high
        (CLIPS, 1.6, 1.0, -1.5, 0.0, True),  # already much more likely: nothing more to gain
        (CLIPS, 0.7, 1.0, -0.7, -0.7, False),  # wrong direction: full gradient back
        (CLIPS, 1.6, -1.0, 1.6, 1.6, False),
        (CLIPS, 0.85, -1.0, 0.85, 0.85, False),
        (CLIPS, 0.7, -1.0, 0.8, 0.0, True),
        (CLIPS, 0.55, -1.0, 0.8, 0.0, True),  # below 1 - low, above 1 - high
        (["grpo_clip"], 3.0, -1.0, 3.0, 3.0, False),
        (["dual_clip"], 3.0, -1.0, 2.0, 0.0, True),
        (["dual_clip"], 1.9, -1.0, 1.9, 1.9, False),
        (["dual_clip"], 0.1, -1.0, 0.8, 0.0, True),  # the usual clip still holds
        (["dual_clip"], 3.0, 1.0, -1.5, 0.0, True),
        (["dual_clip"], 0.1, 1.0, -0.1, -0.1, False),  # no such bound for a positive advantage
        (["dual_clip"], 3.0, 0.0, 0.0, 0.0, False),
        (["unclipped"], 0.1, 2.0, -0.2, -0.2, False),
        (["unclipped"], 5.0, -2.0, 10.0, 10.0, False),
        # log pi is -1: the loss of cispo is weight * A, its derivative -weight * A, also outside of the clip
        (["cispo"], 0.1, 2.0, 1.6, -1.6, True),
        (["cispo"], 0.9, -2.0, -1.8, 1.8, False),
        (["cispo"], 1.4, 2.0, 2.8, -2.8, False),
        (["cispo"], 9.0, -2.0, -3.0, 3.0, True),
    ],
)
def test_one_token_by_hand(names, ratio, advantage, loss, gradient, is_clipped):
    """Bounds of 0.8 and 1.5, and a dual clip of 2."""
    for name in names:
        assert one_token(name, ratio, advantage) == (pytest.approx(loss), pytest.approx(gradient), is_clipped)


@pytest.mark.parametrize(("options", "shrinks"), [({}, True), ({"cliprange": 0.2}, False)])
def test_cispo_pushes_a_token_down_ever_less_as_its_weight_shrinks(options, shrinks):
    """Eight equally likely tokens, of which one has A = -1: without a floor its weight is the ratio itself.

    With a floor of 0.8 each update would push as hard as the first (log ratios -4.4, -23 and -91).
    """
    objective = Objective.from_config(AlgorithmConfig(loss="cispo", **options))
    logits, old, log_ratios = torch.zeros(8, requires_grad=True), torch.tensor([[1 / 8]]).log(), []
    for _ in range(200):
        log_prob = logits.log_softmax(0)[None, :1]
        (loss, _) = objective.policy_gradient_loss(log_prob, torch.ones(1, 1), torch.tensor([[-1.0]]), old)
        (gradient,) = torch.autograd.grad(loss.sum(), logits)
        logits = (logits - 0.5 * gradient).detach().requires_grad_()
        log_ratios.append((logits.log_softmax(0)[0] - old).item())
    expected = (-1.91, -3.39, -4.75) if shrinks else (-4.38, -22.66, -91.23)
    assert [log_ratios[n - 1] for n in (10, 50, 200)] == pytest.approx(expected, rel=0.01)


def test_gspo_by_hand():
    """Row 0 has log ratios 0.3, 0.1 (mean 0.2) and one outside the mask; row 1 has 2, 1 (mean 1.5), clipped."""
    old = torch.full((2, 3), -2.0, dtype=torch.float64)
    log_ratio = torch.tensor([[0.3, 0.1, 9.0], [2.0, 7.0, 1.0]], dtype=torch.float64)
    policy = (old + log_ratio).requires_grad_()
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]])
    advantages = torch.tensor([[3.0], [1.0]], dtype=torch.float64)
    loss, details = ratio_loss("gspo", advantages, policy, old, mask)
    row = -3.0 * math.exp(0.2)
    torch.testing.assert_close(loss, torch.tensor([[row] * 3, [-1.5] * 3], dtype=torch.float64))
    ratios = torch.tensor([[math.exp(0.2)] * 3, [math.exp(1.5)] * 3], dtype=torch.float64)
    torch.testing.assert_close(details["ratio"], ratios)
    assert details["clipped"].tolist() == [[False] * 3, [True] * 3]
    # The response's value at each token, and the token's own gradient: of two tokens with weights 1 and 0, one.
    (loss * torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 1.0]])).sum().backward()
    torch.testing.assert_close(policy.grad, torch.tensor([[row, 0.0, 0.0], [0.0] * 3], dtype=torch.float64))


@pytest.mark.parametrize("name", ["reinforce_with_baseline", "grpo_clip", "gspo", "luspo", "gmpo", "vespo"])
def test_turns_of_one_row_keep_their_own_advantages_and_a_token_of_weight_0_has_none(name):
    """Two turns with advantages +1 and -1, on policy: each token is pushed its own way; none takes a share."""
    old = torch.tensor([[-1.0, -0.5, -2.0, -0.3]])
    policy = old.clone().requires_grad_()
    loss, _ = policy_gradient_step(
        policy, torch.ones(1, 4), objective=Objective(name, "sequence_mean"),
        advantages=torch.tensor([[1.0, 1.0, -1.0, -1.0]]), old_log_probs=old,
        weights=torch.tensor([[1.0, 1.0, 0.0, 1.0]]),
    )  # fmt: skip
    loss.backward()
    torch.testing.assert_close(-policy.grad, torch.tensor([[0.25, 0.25, 0.0, -0.25]]))


def test_gspo_of_an_empty_row_and_of_a_mask_that_does_not_fit():
    column = torch.ones(1, 1)
    _, details = ratio_loss("gspo", column, torch.full((1, 2), 3.0), torch.zeros(1, 2), torch.zeros(1, 2))
    assert details["ratio"].tolist() == [[1.0, 1.0]]
    with pytest.raises(ValueError, match="response_mask"):
        ratio_loss("gspo", column, torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 1))
