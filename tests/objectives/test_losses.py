"""The arguments of losses, their bounds at extreme ratios, and what they refuse.

Their values and gradients are compared with slow loops in test_algorithm_combinations.py.
"""

import math
from typing import get_args

import pytest
import torch
from local_runs import make_config

from grpo_ray.objectives import (
    LOSSES,
    RATIO_LOSSES,
    AlgorithmConfig,
    CorrectionInputs,
    LossType,
    Objective,
    RatioInputs,
    compute_grpo_clip_loss,
    compute_naive_policy_gradient_loss,
    compute_policy_gradient_loss,
    grpo_microbatch_train_step,
    policy_gradient_step,
)
from grpo_ray.objectives.checking import acts_without_advantage, notices_on_loss
from grpo_ray.objectives.inputs import parameters_of


@pytest.mark.parametrize("loss_type", get_args(LossType))
@pytest.mark.parametrize("bounds", [{}, {"cliprange": 0.3}, {"cliprange_high": 0.4, "dual_clip": 1.5}], ids=str)
def test_a_loss_is_the_same_by_its_name_as_in_a_configuration(loss_type, bounds):
    """The handout's functions ignore a bound that the loss does not have."""
    generator = torch.Generator().manual_seed(0)
    policy, old = (-3 * torch.rand(4, 5, generator=generator) for _ in range(2))
    mask = torch.rand(4, 5, generator=generator) < 0.8
    advantages = torch.tensor([[1.0], [-1.0], [0.5], [-2.0]])
    given = {name: value for name, value in bounds.items() if name in parameters_of(LOSSES[loss_type])}
    configured = Objective.from_config(AlgorithmConfig(loss=loss_type, **given))
    assert Objective(loss_type, **given) == configured
    weights = 2 * advantages if loss_type == "no_baseline" else advantages
    tensors = {"raw_rewards": 2 * advantages, "advantages": advantages, "old_log_probs": old}
    expected, _ = configured.policy_gradient_loss(policy, mask, weights, old)
    loss, _ = compute_policy_gradient_loss(policy, loss_type, **tensors, response_mask=mask, **bounds)
    assert torch.equal(loss, expected)

    policy.requires_grad_()
    total, sums = grpo_microbatch_train_step(policy, mask, 3, loss_type, **tensors, **bounds)
    objective = Objective(loss_type, "sequence_mean", **given)
    tensors = {"advantages": weights, "old_log_probs": old}
    expected, _ = policy_gradient_step(policy, mask, objective=objective, denominator=4 * 3, **tensors)
    assert total == expected
    assert not total.requires_grad
    assert sums["num_tokens"] == mask.sum()
    torch.testing.assert_close(policy.grad, torch.autograd.grad(expected, policy)[0])


@pytest.mark.parametrize(
    ("loss_type", "missing"),
    [
        ("no_baseline", "raw_rewards"),
        ("grpo_clip", "advantages"),
        ("grpo_clip", "old_log_probs"),
        *((name, "response_mask") for name in ("gspo", "luspo", "gmpo", "vespo")),
    ],
)
def test_a_missing_argument_is_named(loss_type, missing):
    names = ("raw_rewards", "advantages", "old_log_probs", "response_mask")
    arguments = {name: torch.ones(1, 1) for name in names if name != missing}
    with pytest.raises(ValueError, match=f"'{loss_type}' needs {missing}"):
        compute_policy_gradient_loss(torch.ones(1, 1), loss_type, **arguments)


def test_misspelt_options_are_refused():
    policy = torch.tensor([[-1.0, -1.0]])
    arguments = {"advantages": torch.ones(1, 1), "old_log_probs": policy - 0.1}
    misspelt = Objective("dppo_tv", loss_options={"dleta": 0.01})
    with pytest.raises(
        ValueError, match=r"dppo_tv has no option 'dleta'; it takes cap, delta, delta_high, kl_tau"
    ):
        misspelt.policy_gradient_loss(policy, torch.ones(1, 2), *arguments.values())
    with pytest.raises(ValueError, match="has no option 'tua'"):
        compute_policy_gradient_loss(policy, "sapo", **arguments, tua=1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss_type": "ppo"}, "unknown loss 'ppo'; allowed: no_baseline"),
        ({"aggregation": "mean"}, "unknown aggregation 'mean'; allowed: sequence_mean"),
        ({"kl_estimator": "k4"}, "unknown KL estimator 'k4'"),
        ({"selection": "top"}, "unknown token selection 'top'"),
        ({"loss_type": "dppo_tv", "cliprange": 0.2}, "cliprange: the loss `dppo_tv` has no clip range"),
        ({"loss_type": "sapo", "cliprange_high": 0.2}, "cliprange_high: the loss `sapo` has no clip range"),
        ({"loss_type": "cispo", "dual_clip": 3.0}, "dual_clip works only with `grpo_clip`"),
        ({"loss_type": "grpo_clip", "cliprange": -0.2}, "cliprange is -0.2; it must be above 0"),
        ({"loss_type": "grpo_clip", "kl_coefficient": -1.0}, "kl_coefficient is -1; it must be at least 0"),
    ],
    ids=str,
)
def test_an_objective_refuses_what_it_would_ignore(arguments, message):
    with pytest.raises(ValueError, match=message):
        Objective(**({"loss_type": "grpo_clip"} | arguments))


def test_an_unknown_loss_type_lists_the_allowed():
    with pytest.raises(ValueError, match=rf"'ppo'.*{', '.join(get_args(LossType))}"):
        compute_policy_gradient_loss(torch.ones(1, 1), "ppo")
    with pytest.raises(ValueError, match="unknown correction 'truncate_tokens'; allowed: truncate_token, "):
        Objective("unclipped", corrections=("truncate_tokens",))
    with pytest.raises(ValueError, match=r"must be \[batch, seq\], got \[1\]"):
        compute_naive_policy_gradient_loss(torch.ones(1), torch.ones(1))


@pytest.mark.parametrize("shape", [(3,), (1, 3), (3, 2), (1, 1)])
def test_shapes_that_would_broadcast_are_refused(shape):
    log_probs = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"\[3, 1\]"):
        compute_naive_policy_gradient_loss(torch.ones(shape), log_probs)
    with pytest.raises(ValueError, match=r"advantages must be .*\[3, 1\]"):
        CorrectionInputs.of(log_probs, log_probs, torch.ones(3, 3), torch.ones(shape))
    with pytest.raises(ValueError, match="behaviour has shape"):
        CorrectionInputs.of(log_probs, torch.ones(shape), torch.ones(3, 3), torch.ones(3, 1))
    with pytest.raises(ValueError, match=r"advantages must be .*\[3, 1\]"):
        compute_grpo_clip_loss(torch.ones(shape), log_probs, log_probs, 0.2)
    with pytest.raises(ValueError, match="old_log_probs"):
        compute_grpo_clip_loss(torch.ones(3, 1), log_probs, torch.zeros(shape), 0.2)
    with pytest.raises(ValueError, match="response_mask"):
        compute_policy_gradient_loss(
            log_probs, "reinforce_with_baseline", advantages=torch.ones(3, 1), response_mask=torch.ones(shape)
        )


@pytest.mark.parametrize("dual_clip", [1.0, -2.0, math.nan])
def test_a_dual_clip_that_is_not_above_one_is_refused(dual_clip):
    column = torch.ones(1, 1)
    with pytest.raises(ValueError, match="dual_clip must be above 1"):
        compute_grpo_clip_loss(column, column, column, 0.2, None, dual_clip)


@pytest.mark.parametrize("loss_type", get_args(LossType))
def test_only_a_pull_to_the_old_policy_acts_where_the_advantage_is_zero(loss_type):
    assert not acts_without_advantage(Objective(loss_type))
    if loss_type in ("dppo_tv", "dppo_kl", "ipo"):
        assert acts_without_advantage(Objective(loss_type, loss_options={"kl_tau": 1e-3}))


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("name", RATIO_LOSSES)
def test_extreme_log_probabilities_stay_finite(name, advantage):
    """Every loss with a ratio, also at a token that has become impossible; the details carry no gradient."""
    policy = torch.tensor([[-1e4, 0.0, -300.0, 0.0, -1e4, 1e-7, -torch.inf]], requires_grad=True)
    old = torch.tensor([[0.0, -1e4, 0.0, 0.0, -1e4, -1e-7, -1.0]], requires_grad=True)
    if name in ("cispo", "vespo", "dppo_tv", "dppo_kl", "ipo"):  # of these log pi is a factor
        policy, old = (tensor.detach()[:, :-1].requires_grad_() for tensor in (policy, old))
    mask = torch.ones_like(policy, dtype=torch.bool)
    inputs = RatioInputs(policy, torch.tensor([[advantage]]), mask, old)
    options = {"cliprange": 0.4} if "cliprange" in parameters_of(LOSSES[name]) else {}
    loss, details = LOSSES[name](inputs, **options)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert policy.grad is not None
    assert policy.grad.isfinite().all()
    assert old.grad is None
    assert not any(value.requires_grad for value in details.values())
    assert details["clipped"].shape == details["ratio"].shape == loss.shape == policy.shape
    assert details["clipped"].dtype == torch.bool
    assert details["clip_fraction"].item() == pytest.approx(details["clipped"].double().mean().item())
    if name in ("unclipped", "grpo_clip", "cispo", "sapo"):
        expected = torch.tensor([-20.0, 20.0, -20.0, 0.0]).exp()
        torch.testing.assert_close(details["ratio"][0, :4], expected)


RATIO_FREE = ["algorithm.loss=reinforce_with_baseline"]


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ([], ()),
        (RATIO_FREE, ("weight_sync.max_lag is 1", "set weight_sync.max_lag to 0, or", "truncate_sequence")),
        ([*RATIO_FREE, "weight_sync.max_lag=0"], ()),
        ([*RATIO_FREE, "algorithm.off_policy_correction=truncate_sequence"], ()),
        ([*RATIO_FREE, "algorithm.off_policy_correction=veto"], ("weight_sync.max_lag is 1",)),
        ([*RATIO_FREE, "weight_sync.max_lag=0", "algorithm.epochs_per_batch=2"], ("2 updates", "ask for one")),
        ([*RATIO_FREE, "buffer.replay.frac=0.5"], ("max_lag is 1; buffer.replay.frac is 0.5",)),
    ],
)
def test_a_loss_without_a_ratio_is_remarked_where_tokens_are_old(overrides, parts):
    notices = notices_on_loss(make_config(*overrides))
    assert len(notices) == bool(parts)
    assert all(part in notices[0] for part in parts)
