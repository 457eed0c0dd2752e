"""Clip-higher, dual clip, unclipped, GSPO and CISPO: by hand, against slow loops, and at their bounds."""

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


@pytest.mark.parametrize("name", ["grpo_clip", "dual_clip", "gspo"])
@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "is_clipped"),
    [
        (1.4, 1.0, -1.4, -1.4, False),  # above 1 + low, below 1 + high
        (1.6, 1.0, -1.5, 0.0, True),
        (0.7, 1.0, -0.7, -0.7, False),
        (1.6, -1.0, 1.6, 1.6, False),
        (0.85, -1.0, 0.85, 0.85, False),
        (0.7, -1.0, 0.8, 0.0, True),
        (0.55, -1.0, 0.8, 0.0, True),  # below 1 - low, above 1 - high
    ],
)
def test_each_side_and_sign_of_clip_higher(name, ratio, advantage, loss, gradient, is_clipped):
    assert one_token(name, ratio, advantage) == (pytest.approx(loss), pytest.approx(gradient), is_clipped)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "is_clipped"),
    [
        (3.0, -1.0, 2.0, 0.0, True),  # without the dual clip: 3, and a gradient of 3
        (1.9, -1.0, 1.9, 1.9, False),
        (0.1, -1.0, 0.8, 0.0, True),  # the usual clip still holds
        (3.0, 1.0, -1.5, 0.0, True),
        (0.1, 1.0, -0.1, -0.1, False),  # no such bound for a positive advantage
        (3.0, 0.0, 0.0, 0.0, False),
    ],
)
def test_dual_clip_by_hand(ratio, advantage, loss, gradient, is_clipped):
    actual = one_token("dual_clip", ratio, advantage)
    assert actual == (pytest.approx(loss), pytest.approx(gradient), is_clipped)
    if advantage < 0 and ratio > DUAL:
        assert one_token("grpo_clip", ratio, advantage) == (pytest.approx(3.0), pytest.approx(3.0), False)


@pytest.mark.parametrize("dual_clip", [1.0, 0.5, -2.0, math.nan])
def test_a_dual_clip_that_is_not_above_one_is_refused(dual_clip):
    column = torch.ones(1, 1)
    with pytest.raises(ValueError, match="dual_clip must be above 1"):
        compute_grpo_clip_loss(column, column, column, 0.2, None, dual_clip)


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("ratio", [0.1, 1.0, 5.0])
def test_unclipped_by_hand(ratio, advantage):
    expected = pytest.approx(-ratio * advantage)
    assert one_token("unclipped", ratio, advantage) == (expected, expected, False)


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize(
    ("ratio", "weight", "is_clipped"),
    [(0.1, 0.8, True), (0.9, 0.9, False), (1.4, 1.4, False), (9.0, 1.5, True)],
)
def test_cispo_by_hand_keeps_a_gradient_outside_the_clip(ratio, weight, is_clipped, advantage):
    # log pi = -1: the loss is weight * A, its derivative -weight * A
    expected = (pytest.approx(weight * advantage), pytest.approx(-weight * advantage), is_clipped)
    assert one_token("cispo", ratio, advantage) == expected


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
def test_turns_of_one_row_keep_their_own_advantages(name):
    """Two turns of two tokens with advantages +1 and -1, on policy: each token is pushed its own way."""
    old = torch.tensor([[-1.0, -0.5, -2.0, -0.3]])
    policy = old.clone().requires_grad_()
    loss, _ = policy_gradient_step(
        policy, torch.ones(1, 4), objective=Objective(name, "sequence_mean"),
        advantages=torch.tensor([[1.0, 1.0, -1.0, -1.0]]), old_log_probs=old,
    )  # fmt: skip
    loss.backward()
    torch.testing.assert_close(-policy.grad, torch.tensor([[0.25, 0.25, -0.25, -0.25]]))


@pytest.mark.parametrize("name", ["grpo_clip", "gspo", "luspo", "gmpo", "vespo"])
def test_a_token_with_weight_zero_is_not_trained_and_no_other_takes_its_share(name):
    old = torch.tensor([[-1.0, -0.5, -2.0, -0.3]])
    policy = old.clone().requires_grad_()
    loss, _ = policy_gradient_step(
        policy, torch.ones(1, 4), objective=Objective(name, "sequence_mean"),
        advantages=torch.ones(1, 1), old_log_probs=old, weights=torch.tensor([[1.0, 1.0, 0.0, 1.0]]),
    )  # fmt: skip
    loss.backward()
    torch.testing.assert_close(-policy.grad, torch.tensor([[0.25, 0.25, 0.0, 0.25]]))


def test_gspo_of_an_empty_row_and_of_a_mask_that_does_not_fit():
    column = torch.ones(1, 1)
    _, details = ratio_loss("gspo", column, torch.full((1, 2), 3.0), torch.zeros(1, 2), torch.zeros(1, 2))
    assert details["ratio"].tolist() == [[1.0, 1.0]]
    with pytest.raises(ValueError, match="response_mask"):
        ratio_loss("gspo", column, torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 1))


def batch_of(seed=0):
    """Make advantages of both signs, and ratios between and on either side of all bounds."""
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(6, 5, generator=generator, dtype=torch.float64)
    policy = old + 0.8 * torch.randn(6, 5, generator=generator, dtype=torch.float64)
    policy[3:] += torch.tensor([[1.0], [-1.0], [0.5]])
    advantages = torch.tensor([[0.7], [-1.3], [2.0], [-0.4], [1.0], [-2.0]], dtype=torch.float64)
    mask = torch.arange(5) < torch.tensor([[5], [3], [1], [4], [5], [2]])
    return advantages, policy, old, mask


def loop_loss(name, advantages, policy, old, mask):
    """Compute the formulas token by token with torch scalars, differentiable by autograd."""
    total = policy.new_zeros(())
    for row in range(policy.shape[0]):
        tokens = [column for column in range(policy.shape[1]) if mask[row, column]]
        worth = advantages[row, 0].item()
        ratios = [torch.exp(policy[row, t] - old[row, t]) for t in tokens]
        if name == "gspo":
            product = torch.stack(ratios).prod()
            ratios = [product ** (1 / len(tokens))] * len(tokens)
        for column, ratio in zip(tokens, ratios, strict=True):
            bounded = 1 - LOW if ratio < 1 - LOW else 1 + HIGH if ratio > 1 + HIGH else ratio
            if name == "unclipped":
                objective = ratio * worth
            elif name == "cispo":
                objective = torch.as_tensor(bounded).item() * worth * policy[row, column]
            else:
                objective = min(ratio * worth, bounded * worth)
                if name == "dual_clip" and worth < 0:
                    objective = max(objective, DUAL * worth)
            total = total - objective / len(tokens)
    return total


@pytest.mark.parametrize("name", RATIO_LOSSES)
def test_values_and_gradients_against_a_slow_loop(name):
    advantages, policy, old, mask = batch_of()
    leaf, loop_leaf = policy.clone().requires_grad_(), policy.clone().requires_grad_()
    loss, details = ratio_loss(name, advantages, leaf, old, mask)
    total = ((loss * mask).sum(1) / mask.sum(1)).sum()
    total.backward()
    expected = loop_loss(name, advantages, loop_leaf, old, mask)
    expected.backward()
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(leaf.grad, loop_leaf.grad)
    if name != "unclipped":
        assert 0 < details["clipped"][mask].sum() < mask.sum()
    if name in ("grpo_clip", "dual_clip", "gspo"):
        assert torch.equal(leaf.grad[mask] == 0, details["clipped"][mask])


@pytest.mark.parametrize("name", ["unclipped", "grpo_clip", "dual_clip", "gspo"])
def test_gradients_match_finite_differences(name):
    """A token of `gspo` has only its own gradient; the mean over a response has that of the formula."""
    advantages, policy, old, mask = batch_of(seed=1)
    policy = policy.requires_grad_()

    def loss(policy_log_probs: torch.Tensor) -> torch.Tensor:
        per_token = ratio_loss(name, advantages, policy_log_probs, old, mask)[0]
        return (per_token * mask).sum(1) / mask.sum(1)

    assert torch.autograd.gradcheck(loss, (policy,), eps=1e-7, atol=1e-6)


def test_cispo_gradient_matches_finite_differences_with_its_weights_held():
    advantages, policy, old, mask = batch_of(seed=1)
    policy = policy.requires_grad_()
    weights = torch.where(mask, (policy - old).exp().clamp(1 - LOW, 1 + HIGH), 0.0).detach()
    loss, _ = ratio_loss("cispo", advantages, policy, old, mask)
    loss[mask].sum().backward()
    for index in mask.nonzero().tolist():
        values = []
        for step in (1e-5, -1e-5):
            moved = policy.detach().clone()
            moved[tuple(index)] += step
            values.append((-weights * advantages * moved).sum().item())
        numeric = (values[0] - values[1]) / 2e-5
        assert policy.grad[tuple(index)].item() == pytest.approx(numeric, rel=1e-6)


@pytest.mark.parametrize("name", RATIO_LOSSES)
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_extreme_log_ratios_stay_finite(name, advantage):
    policy = torch.tensor([[-1e4], [0.0], [-300.0], [0.0]], requires_grad=True)
    old = torch.tensor([[0.0], [-1e4], [0.0], [-300.0]])
    loss, details = ratio_loss(name, torch.full((4, 1), advantage), policy, old)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert policy.grad.isfinite().all()
    torch.testing.assert_close(details["ratio"], torch.tensor([[-20.0], [20.0], [-20.0], [20.0]]).exp())


@pytest.mark.parametrize("name", ["unclipped", "grpo_clip", "dual_clip", "gspo"])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_a_token_that_became_impossible_has_a_finite_loss_and_gradient(name, advantage):
    policy = torch.tensor([[-torch.inf, -1.0]], requires_grad=True)
    loss, _ = ratio_loss(name, torch.tensor([[advantage]]), policy, torch.full((1, 2), -1.0))
    loss.sum().backward()
    assert loss.isfinite().all()
    assert policy.grad.isfinite().all()


@pytest.mark.parametrize("name", RATIO_LOSSES)
def test_old_log_probs_and_details_carry_no_gradient(name):
    advantages, policy, old, mask = batch_of()
    policy, old = policy.requires_grad_(), old.requires_grad_()
    loss, details = ratio_loss(name, advantages, policy, old, mask)
    loss.sum().backward()
    assert old.grad is None
    assert not any(value.requires_grad for value in details.values())
    assert details["clipped"].shape == details["ratio"].shape == loss.shape == policy.shape
    assert details["clipped"].dtype == torch.bool
    assert details["clip_fraction"].item() == pytest.approx(details["clipped"].double().mean().item())


@pytest.mark.parametrize("name", RATIO_LOSSES)
def test_shapes_that_would_broadcast_are_refused(name):
    log_probs = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"advantages must be .*\[3, 1\]"):
        ratio_loss(name, torch.ones(3), log_probs, log_probs)
    with pytest.raises(ValueError, match="old_log_probs"):
        ratio_loss(name, torch.ones(3, 1), log_probs, torch.zeros(1, 3))
