"""The arguments of losses, their bounds at extreme ratios, what they refuse; and one micro-batch's step.

Their values and gradients are compared with slow loops in test_algorithm_combinations.py."""

import math
from typing import get_args

import numpy as np
import pytest
import torch
from local_runs import make_config

from grpo_ray.config.algorithm import TokenSelection
from grpo_ray.objectives import (
    LOSSES,
    RATIO_LOSSES,
    SELECTIONS,
    AlgorithmConfig,
    CorrectionInputs,
    LossType,
    Objective,
    RatioInputs,
    compute_grpo_clip_loss,
    compute_naive_policy_gradient_loss,
    compute_policy_gradient_loss,
    get_response_log_probs,
    grpo_microbatch_train_step,
    loss_denominator,
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
    if loss_type == "grpo_clip":
        given_bounds = {"cliprange": 0.2, **bounds}
        assert torch.equal(compute_grpo_clip_loss(advantages, policy, old, **given_bounds)[0], loss)

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
    one = torch.ones(1, 1)
    misspelt = Objective("dppo_tv", loss_options={"dleta": 0.01})
    takes = "dppo_tv has no option 'dleta'; it takes cap, delta, delta_high, kl_tau"
    with pytest.raises(ValueError, match=takes):
        misspelt.policy_gradient_loss(one, one, one, one)
    with pytest.raises(ValueError, match="has no option 'tua'"):
        compute_policy_gradient_loss(one, "sapo", advantages=one, old_log_probs=one, tua=1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss_type": "ppo"}, f"unknown loss 'ppo'; allowed: {', '.join(get_args(LossType))}"),
        ({"aggregation": "mean"}, "unknown aggregation 'mean'; allowed: sequence_mean"),
        ({"kl_estimator": "k4"}, "unknown KL estimator 'k4'"),
        ({"selection": "top"}, "unknown token selection 'top'"),
        ({"corrections": ("truncate",)}, "unknown correction 'truncate'; allowed: truncate_token, "),
        ({"loss_type": "dppo_tv", "cliprange": 0.2}, "cliprange: the loss `dppo_tv` has no clip range"),
        ({"loss_type": "sapo", "cliprange_high": 0.2}, "cliprange_high: the loss `sapo` has no clip range"),
        ({"loss_type": "cispo", "dual_clip": 3.0}, "dual_clip works only with `grpo_clip`"),
        ({"cliprange": -0.2}, "cliprange is -0.2; it must be above 0"),
        ({"dual_clip": 1.0}, "dual_clip is 1; it must be above 1"),
        ({"dual_clip": math.nan}, "dual_clip is nan; it must be above 1"),
        ({"kl_coefficient": -1.0}, "kl_coefficient is -1; it must be at least 0"),
        ({"entropy_bonus": math.nan}, "entropy_bonus is nan; it must be at least 0"),
    ],
    ids=str,
)
def test_an_objective_refuses_what_it_would_ignore(arguments, message):
    with pytest.raises(ValueError, match=message):
        Objective(**({"loss_type": "grpo_clip"} | arguments))


@pytest.mark.parametrize("shape", [(3,), (1, 3), (3, 2), (1, 1)])
def test_shapes_that_would_broadcast_are_refused(shape):
    log_probs, column = torch.zeros(3, 3), torch.ones(3, 1)
    with pytest.raises(ValueError, match=r"must be \[batch, seq\], got \[3\]"):
        compute_naive_policy_gradient_loss(column, log_probs[0])
    with pytest.raises(ValueError, match=r"\[3, 1\]"):
        compute_naive_policy_gradient_loss(torch.ones(shape), log_probs)
    with pytest.raises(ValueError, match=r"advantages must be .*\[3, 1\]"):
        CorrectionInputs.of(log_probs, log_probs, torch.ones(3, 3), torch.ones(shape))
    with pytest.raises(ValueError, match="behaviour has shape"):
        CorrectionInputs.of(log_probs, torch.ones(shape), torch.ones(3, 3), column)
    with pytest.raises(ValueError, match=r"advantages must be .*\[3, 1\]"):
        compute_grpo_clip_loss(torch.ones(shape), log_probs, log_probs, 0.2)
    with pytest.raises(ValueError, match="old_log_probs"):
        compute_grpo_clip_loss(column, log_probs, torch.zeros(shape), 0.2)
    with pytest.raises(ValueError, match="response_mask"):
        compute_policy_gradient_loss(log_probs, "grpo_clip", None, column, log_probs, 0.2, torch.ones(shape))


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


# ---- one micro-batch: the tokens that are counted, what is refused instead of ignored, what is worked out ----


def test_clipped_tokens_are_told_apart_by_their_bound_and_counted_where_there_is_an_advantage():
    """Ratios 1, e^0.5, 1/e, e^2: with A > 0 the upper bound clips, with A < 0 the lower, with A = 0 none."""
    cases = (1, None, (4, 2, 0)), (-1, None, (4, 1, 1)), (-1, 4, (4, 2, 1)), (0, None, (0, 0, 0))
    for advantage, dual_clip, expected in cases:
        _, sums = policy_gradient_step(
            torch.tensor([[0.0, 0.5, -1.0, 2.0]]), torch.ones(1, 4),
            objective=Objective("grpo_clip", "constant", 0.2, dual_clip=dual_clip), denominator=4,
            advantages=torch.tensor([[float(advantage)]]), old_log_probs=torch.zeros(1, 4),
        )  # fmt: skip
        assert tuple(sums[name].item() for name in ("num_ratios", "num_clipped", "num_clipped_low")) == expected


def test_bad_arguments_are_refused():
    log_probs, mask, column = torch.zeros(2, 3), torch.ones(2, 3), torch.ones(2, 1)
    with pytest.raises(ValueError, match="gradient_accumulation_steps"):
        grpo_microbatch_train_step(log_probs, mask, 0, "no_baseline", raw_rewards=column)
    with pytest.raises(ValueError, match="response_mask"):
        grpo_microbatch_train_step(log_probs, column, 1, "no_baseline", raw_rewards=column)
    selecting = Objective("grpo_clip", selection="top_entropy")
    constant, given = Objective("reinforce_with_baseline", "constant"), (log_probs, mask)
    with pytest.raises(ValueError, match=r"top_entropy acts through weights.*SELECTIONS\['top_entropy'\]"):
        policy_gradient_step(*given, objective=selecting, advantages=column, old_log_probs=log_probs)
    with pytest.raises(ValueError, match=r"maximum response length.*loss_denominator\('constant'"):
        policy_gradient_step(*given, objective=constant, advantages=column)


def test_corrections_without_weights_are_refused():
    policy, behaviour, mask = torch.zeros(1, 2), torch.tensor([[-1.0, 0.0]]), torch.ones(1, 2)
    advantages = torch.ones(1, 1)
    objective = Objective("reinforce_with_baseline", corrections=("truncate_token",))
    arguments = {"objective": objective, "advantages": advantages}
    with pytest.raises(ValueError, match=r"truncate_token act through weights.*objective.correction_weights"):
        policy_gradient_step(policy, mask, **arguments)
    inputs = CorrectionInputs.of(policy, behaviour, mask, advantages)
    weights, _ = objective.correction_weights(inputs)
    assert weights.tolist() == [[2.0, 1.0]]  # e, at most the cap of 2
    policy_gradient_step(policy, mask, **arguments, weights=weights)
    misspelt = Objective("grpo_clip", corrections=("truncate_token",), correction_options={"cpa": 2.0})
    with pytest.raises(ValueError, match=r"\(truncate_token\) has no option 'cpa'; it takes cap, floor"):
        misspelt.correction_weights(inputs)


def test_an_entropy_without_gradient_is_refused():
    logits = torch.nn.Embedding(5, 5)
    ids = torch.tensor([[0, 1, 2]])
    found = get_response_log_probs(logits, ids, ids, return_token_entropy=True)
    arguments = {"advantages": torch.ones(1, 1), "entropy": found["token_entropy"]}
    arguments["objective"] = Objective("reinforce_with_baseline", entropy_bonus=1.0)
    with pytest.raises(ValueError, match=r"needs an entropy with a gradient.*compute_entropy\(logits\)"):
        policy_gradient_step(found["log_probs"], torch.ones(1, 3), **arguments)
    with torch.no_grad():  # a loss to look at
        policy_gradient_step(found["log_probs"].detach(), torch.ones(1, 3), **arguments)


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean", "sequence_sum"])
def test_without_a_denominator_the_rows_are_the_whole_batch(aggregation):
    """Four rows of 1, 2, 2 and 0 tokens."""
    mask, row_tokens = torch.tensor([[1, 0], [1, 1], [1, 1], [0, 0]]), torch.tensor([3, 3, 2, 2])
    policy, advantages = torch.rand(4, 2), torch.tensor([[1.0], [-2.0], [3.0], [0.5]])
    arguments = {"advantages": advantages, "objective": Objective("reinforce_with_baseline", aggregation)}
    denominator = loss_denominator(aggregation, 4, 5, 8, 4)
    expected = policy_gradient_step(policy, mask, denominator=denominator, **arguments)
    assert policy_gradient_step(policy, mask, **arguments)[0] == expected[0]
    with pytest.raises(ValueError, match="row_tokens needs denominator"):
        policy_gradient_step(policy, mask, row_tokens=row_tokens, **arguments)
    with pytest.raises(ValueError, match="penalties need old_log_probs"):
        policy_gradient_step(policy, mask, penalties=torch.ones(4, 2), **arguments)


def test_a_token_without_an_old_logprob_has_no_penalty_in_a_loss_without_a_ratio():
    policy = torch.tensor([[-1.0, -2.0, -0.5, -1.0]], requires_grad=True)
    loss, _ = policy_gradient_step(
        policy, torch.ones(1, 4), objective=Objective("reinforce_with_baseline"), advantages=torch.ones(1, 1),
        old_log_probs=torch.tensor([[math.nan, -1.5, -1.0, -1.0]]), penalties=torch.tensor([[3.0, 3, 2, 0]]),
    )  # fmt: skip
    assert loss.item() == (1.0 + 2.0 + 0.5 + 1.0 + 3 * 0.5 + 2 * 0.5) / 4
    loss.backward()
    assert policy.grad.tolist() == [[-0.25, (-1.0 - 3.0) / 4, (-1.0 + 2.0) / 4, -0.25]]


LOG_PROBS = np.array([-1.0, -3.0, -1.0, -3.0], np.float32)  # mean -2
ADVANTAGES = np.array([3.0, 1.0, -1.0, -3.0], np.float32)  # mean 0
# Covariances (log p + 2) * A: 3, -1, -1, 3


def select(name: str, entropies: np.ndarray | None = None, seed: int = 0, **options: float):
    entropies = np.zeros(4, np.float32) if entropies is None else entropies
    rng = np.random.default_rng(seed)
    weights, penalties = SELECTIONS[name](LOG_PROBS, entropies, ADVANTAGES, rng, **options)
    return weights.tolist(), penalties.tolist()


def test_top_entropy_keeps_a_share_of_the_tokens() -> None:
    assert ("none", *SELECTIONS) == get_args(TokenSelection)
    entropies = np.array([0.1, 0.4, 0.2, 0.3], np.float32)
    assert select("top_entropy", entropies, share=0.5) == ([0, 1, 0, 1], [0] * 4)
    assert select("top_entropy", entropies, share=0.25) == ([0, 1, 0, 0], [0] * 4)
    assert select("top_entropy", entropies, share=1.0) == ([1] * 4, [0] * 4)
    assert select("top_entropy", np.full(4, 0.5), share=0.25) == ([1] * 4, [0] * 4)  # all are the quantile


def test_clip_cov_leaves_out_some_of_the_candidates() -> None:
    assert select("clip_cov", share=0.5) == ([0, 1, 1, 0], [0] * 4)
    assert select("clip_cov", share=1.0) == ([0, 1, 1, 0], [0] * 4)  # there are no more candidates
    one = {tuple(select("clip_cov", seed=seed, share=0.25)[0]) for seed in range(20)}
    assert one == {(0, 1, 1, 1), (1, 1, 1, 0)}
    assert select("clip_cov", share=0.5, low=3.5) == ([1] * 4, [0] * 4)
    assert select("clip_cov", share=0.5, low=-2.0, high=0.0) == ([1, 0, 0, 1], [0] * 4)


def test_kl_cov_holds_the_largest_back() -> None:
    assert select("kl_cov", share=0.5, coefficient=0.3) == ([1] * 4, pytest.approx([0.3, 0, 0, 0.3]))
    assert sum(select("kl_cov")[1]) == 1.0  # at least one token


def test_a_penalty_that_is_always_0_is_refused() -> None:
    for size in (None, 4):
        sizes = {"prompts_per_step": 2, "samples_per_prompt": 2, "train_batch_size": size}
        with pytest.raises(ValueError, match=r"kl_cov` penalizes .* set old_log_probs to `behaviour`"):
            AlgorithmConfig(token_selection="kl_cov", old_log_probs="proximal", **sizes)
    AlgorithmConfig(token_selection="kl_cov", old_log_probs="proximal", epochs_per_batch=2)
