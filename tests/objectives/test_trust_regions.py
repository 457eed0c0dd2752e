"""Losses with a ratio by hand, a row of tokens each; in every combination: test_algorithm_combinations.py."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo_ray.config.algorithm import AlgorithmConfig
from grpo_ray.objectives import LOSSES, Objective, RatioInputs, policy_gradient_step

CLIP = {"cliprange": 0.2, "cliprange_high": 0.5}
DUAL = {**CLIP, "dual_clip": 2.0}
UP, DOWN = (1 / (1 + math.exp(-t)) for t in (1.0, 1.05))  # sigmoids
ROSE, FELL = ([0.69, 0.71, 0.29], [1.38, 1.42, 0.58]), ([0.31, 0.29, 0.71], [0.62, 0.58, 1.42])  # from 0.5
LN2, LN4_5 = math.log(2), math.log(4.5)
HELD, LOGS = {"cliprange": 0.4}, [math.exp(0.6), math.exp(0.1), math.exp(-0.7), 0]
GMPO, GMPO_DOWN, GSPO = -2 * math.exp(-0.2 / 3), 2 * math.exp(0.1), -3 * math.exp(0.2)


def a_row(new: list[float], ratios: list[float], advantage: float) -> RatioInputs:
    """Make inputs of probabilities and ratios; a ratio of 0 stands for a token outside the mask."""
    log_probs = torch.tensor([new], dtype=torch.float64).log().requires_grad_()
    ratio = torch.tensor([ratios], dtype=torch.float64)
    old = log_probs.detach() - ratio.log().masked_fill(ratio == 0, 9.0)
    return RatioInputs(log_probs, torch.tensor([[advantage]], dtype=torch.float64), ratio > 0, old)


@pytest.mark.parametrize(
    ("names", "options", "new", "ratios", "advantage", "gradients", "clipped", "losses"),
    [
        # Those with log pi as a factor: the loss is the gradient times log pi.
        # A ratio of 3 of a rare token is a small change; a ratio of 1.32 of a frequent one is large.
        ("dppo_tv dppo_kl", {}, [0.003, 0.66], [3, 1.32], 1, [-3, 0], [0, 1], None),
        ("dppo_tv", {"delta": 0.2}, *ROSE, 1, [-1.38, 0, -0.58], [0, 1, 0], None),
        ("dppo_tv", {"delta": 0.2}, *FELL, -1, [0.62, 0, 1.42], [0, 1, 0], None),
        # KL 0.078 of 0.5 to 0.69 or 0.31, and 0.097 of 0.5 to 0.71 or 0.29.
        ("dppo_kl", {"delta": 0.09}, *ROSE, 1, [-1.38, 0, -0.58], [0, 1, 0], None),
        ("dppo_kl", {"delta": 0.09}, *FELL, -1, [0.62, 0, 1.42], [0, 1, 0], None),
        ("dppo_tv", {"delta": 0.05, "delta_high": 0.2}, [0.3, 4e-4], [1.5, 40], 1, [-1.5, -20], [0, 0], None),
        ("dppo_tv", {"delta_high": 0.05, "cap": 7.0}, [0.3, 4e-4], [1.5, 40], 1, [0, -7], [1, 0], None),
        # Changes of 0.25, -0.35 and 0.35: beyond 0.3 there is no gradient, up or down.
        ("ipo", {}, [0.5, 0.2, 0.9], [2, 0.2 / 0.55, 0.9 / 0.55], 1, [-2, 0, 0], [0, 1, 1], None),
        ("ipo", {}, [0.5, 0.2, 0.9], [2, 0.2 / 0.55, 0.9 / 0.55], -1, [2, 0, 0], [0, 1, 1], None),
        # W = 2 * 0.75: 1.5^2 e^(3 - 4.5) up, 1.5^3 e^(2 - 3) down.
        ("vespo", {}, [0.4, 0.3, 0.5], [2, 0.75, 0], 2, [-2 * 0.502042861] * 2, [0, 0], None),
        ("vespo", {}, [0.4, 0.3, 0.5], [2, 0.75, 0], -2, [2 * 1.241593114] * 2, [0, 0], None),
        ("cispo", CLIP, [0.3, 0.3], [0.1, 1.4], 2, [-1.6, -2.8], [1, 0], None),
        ("cispo", CLIP, [0.3, 0.3], [0.9, 9], -2, [1.8, 3], [0, 1], None),
        # A pull back by ln(2)^2 and, outside the trust region, by ln(4.5)^2.
        ("dppo_tv dppo_kl ipo", {"delta": 0.15, "kl_tau": 0.3}, [0.2, 0.9], [2, 4.5], 1,
         [-2 + 0.6 * LN2, 0.6 * LN4_5], [0, 1], [-2 * math.log(0.2) + 0.3 * LN2**2, 0.3 * LN4_5**2]),
        # Others.
        ("sapo", {}, [0.2, 0.4], [1, 2], 1, [-1, -8 * UP * (1 - UP)], [0, 0], [-2, -4 * UP]),
        ("sapo", {}, [0.2, 0.4], [1, 2], -1, [1, 8 * DOWN * (1 - DOWN)], [0, 0], [2 / 1.05, 4 * DOWN / 1.05]),
        ("sapo", {"tau": 2}, [0.2], [1], 1, [-1], [0], [-1]),
        # Log ratios 0.6, 0.1 and -0.7: up, the first is held at 0.4; down, the last at -0.4.
        ("gmpo", HELD, [0.5] * 4, LOGS, 2, [0, GMPO, GMPO], [1, 0, 0], [GMPO] * 3),
        ("gmpo", HELD, [0.5] * 4, LOGS, -2, [GMPO_DOWN, GMPO_DOWN, 0], [0, 0, 1], [GMPO_DOWN] * 3),
        # Log ratios 0.3 and 0.1, so a mean of 0.2, then 2 and 1, which is clipped.
        ("gspo luspo", CLIP, [0.1] * 3, [math.exp(0.3), math.exp(0.1), 0], 3, [GSPO] * 2, [0, 0], [GSPO] * 2),
        ("gspo luspo", CLIP, [0.1] * 3, [math.exp(2), 0, math.e], 1, [0, 0], [1, 1], [-1.5] * 2),
        ("unclipped", {}, [0.2, 0.2], [0.1, 5], -2, [0.2, 10], [0, 0], [0.2, 10]),
        ("grpo_clip", CLIP, [0.3] * 3, [1.4, 1.6, 0.7], 1, [-1.4, 0, -0.7], [0, 1, 0], [-1.4, -1.5, -0.7]),
        ("grpo_clip", CLIP, [0.3] * 3, [3, 0.85, 0.7], -1, [3, 0.85, 0], [0, 0, 1], [3, 0.85, 0.8]),
        ("grpo_clip", DUAL, [0.3] * 3, [3, 1.9, 0.1], -1, [0, 1.9, 0], [1, 0, 1], [2, 1.9, 0.8]),
        ("grpo_clip", DUAL, [0.3] * 2, [3, 0.1], 1, [0, -0.1], [1, 0], [-1.5, -0.1]),
        ("grpo_clip", DUAL, [0.3], [3], 0, [0], [0], [0]),
    ],
)  # fmt: skip
def test_a_row_by_hand(
    names: str, options: dict[str, Any], new: list[float], ratios: list[float], advantage: float,
    gradients: list[float], clipped: list[int], losses: list[float] | None,
) -> None:  # fmt: skip
    for name in names.split():
        inputs = a_row(new, ratios, advantage)
        loss, details = LOSSES[name](inputs, **options)  # type: ignore[index]
        (gradient,) = torch.autograd.grad(loss[inputs.mask].sum(), inputs.policy_log_probs)
        expected = losses or (gradient * inputs.policy_log_probs)[inputs.mask].tolist()
        assert gradient[inputs.mask].tolist() == pytest.approx(gradients)
        assert loss[inputs.mask].tolist() == pytest.approx(expected)
        assert details["clipped"].expand_as(inputs.mask)[inputs.mask].tolist() == clipped


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


def test_temperatures_of_integer_advantages_are_none_themselves() -> None:
    inputs = a_row([0.2, 0.4], [1, 2], -1)
    whole = replace(inputs, advantages=inputs.advantages.int())
    assert torch.equal(LOSSES["sapo"](whole)[0], LOSSES["sapo"](inputs)[0])


def test_gspo_has_one_ratio_per_row_and_1_of_an_empty_one() -> None:
    for ratios, expected in (([0, 0, 0], 1.0), ([2, 0, 8], 4.0)):
        _, details = LOSSES["gspo"](a_row([0.5] * 3, ratios, 1), cliprange=0.2)
        assert details["ratio"].tolist() == [pytest.approx([expected] * 3)]


def test_luspo_is_gspo_summed_over_each_response() -> None:
    config = AlgorithmConfig(loss="luspo")
    assert (config.loss_aggregation, config.clip_epsilons) == ("sequence_sum", (3e-4, 4e-4))


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
