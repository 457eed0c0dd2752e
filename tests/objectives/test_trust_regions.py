"""DPPO, IPO, SAPO, GMPO, LUSPO and VESPO by hand, and the bounds of all losses with a ratio."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo_ray.config.algorithm import AlgorithmConfig
from grpo_ray.objectives import (
    LOSSES,
    Objective,
    RatioInputs,
    compute_grpo_clip_loss,
    compute_policy_gradient_loss,
    policy_gradient_step,
)


def inputs_of(new: list[list[float]], old: list[list[float]], advantages: list[list[float]]) -> RatioInputs:
    """Make inputs of probabilities; a probability of 0 stands for a token outside the mask."""
    policy, before = torch.tensor(new, dtype=torch.float64), torch.tensor(old, dtype=torch.float64)
    mask = before > 0
    log_probs = policy.log().masked_fill(~mask, 0.0).requires_grad_()
    advantage = torch.tensor(advantages, dtype=torch.float64)
    return RatioInputs(log_probs, advantage, mask, before.log().masked_fill(~mask, 0.0))


def loss_and_gradient(
    name: str, inputs: RatioInputs, **options: Any
) -> tuple[list[float], list[float], list[bool]]:
    """Return the loss, its gradient and the clipped tokens, flattened, of the tokens in the mask."""
    loss, details = LOSSES[name](inputs, **options)  # type: ignore[index]
    (gradient,) = torch.autograd.grad(loss[inputs.mask].sum(), inputs.policy_log_probs)
    clipped = details["clipped"].expand_as(inputs.mask)[inputs.mask]
    return loss[inputs.mask].tolist(), gradient[inputs.mask].tolist(), clipped.tolist()


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
@pytest.mark.parametrize(
    ("old", "new", "advantage", "is_clipped"),
    [
        (0.5, 0.69, 1.0, False),  # kl 0.078
        (0.5, 0.71, 1.0, True),  # kl 0.097
        (0.5, 0.71, -1.0, False),  # on its way back
        (0.5, 0.29, -1.0, True),
        (0.5, 0.29, 1.0, False),
        (0.5, 0.31, -1.0, False),
    ],
)
def test_dppo_stops_at_a_change_of_probability(
    name: str, old: float, new: float, advantage: float, is_clipped: bool
) -> None:
    inputs = inputs_of([[new]], [[old]], [[advantage]])
    delta = {"dppo_tv": 0.2, "dppo_kl": 0.085}[name]
    (loss,), (gradient,), (clipped,) = loss_and_gradient(name, inputs, delta=delta)
    ratio = 0.0 if is_clipped else new / old
    assert loss == pytest.approx(-ratio * advantage * math.log(new))
    assert gradient == pytest.approx(-ratio * advantage)
    assert clipped is is_clipped


def test_dppo_lets_rare_tokens_rise_and_holds_frequent_ones() -> None:
    """A ratio of 3 of a rare token is a small change; a ratio of 1.4 of a frequent one is large."""
    inputs = inputs_of([[0.003, 0.7]], [[0.001, 0.5]], [[1.0]])
    for name in ("dppo_tv", "dppo_kl"):
        _, gradient, clipped = loss_and_gradient(name, inputs)
        assert gradient == pytest.approx([-3.0, 0.0])
        assert clipped == [False, True]


def test_dppo_has_two_bounds_and_a_cap() -> None:
    inputs = inputs_of([[0.3, 0.0004]], [[0.2, 0.00001]], [[1.0]])
    assert loss_and_gradient("dppo_tv", inputs, delta=0.05, delta_high=0.2)[1] == pytest.approx([-1.5, -20.0])
    assert loss_and_gradient("dppo_tv", inputs, delta=0.2, delta_high=0.05, cap=7.0)[1] == [0.0, -7.0]


def test_ipo_leaves_out_both_directions_whatever_the_advantage() -> None:
    """Changes of 0.25, -0.35 and 0.35: those beyond 0.3 have no gradient, up or down."""
    for advantage in (1.0, -1.0):
        inputs = inputs_of([[0.5, 0.2, 0.9]], [[0.25, 0.55, 0.55]], [[advantage]])
        loss, gradient, clipped = loss_and_gradient("ipo", inputs)
        assert gradient == pytest.approx([-2 * advantage, 0.0, 0.0])
        assert loss == pytest.approx([-2 * advantage * math.log(0.5), 0.0, 0.0])
        assert clipped == [False, True, True]


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl", "ipo"])
def test_the_squared_log_ratio_by_hand(name: str) -> None:
    """0.1 -> 0.2 and 0.2 -> 0.9, which is outside: ln(2)^2 and ln(4.5)^2, with gradients of twice the logs."""
    inputs = inputs_of([[0.2, 0.9]], [[0.1, 0.2]], [[1.0]])
    plain, without, _ = loss_and_gradient(name, inputs, delta=0.15)
    loss, gradient, clipped = loss_and_gradient(name, inputs, delta=0.15, kl_tau=0.3)
    logs = [math.log(2), math.log(4.5)]
    assert clipped == [False, True]
    assert loss == pytest.approx([a + 0.3 * log**2 for a, log in zip(plain, logs, strict=True)])
    assert gradient == pytest.approx([a + 0.6 * log for a, log in zip(without, logs, strict=True)])
    assert without == pytest.approx([-2.0, 0.0])


def test_vespo_by_hand() -> None:
    """Ratios 2 and 0.75, so W = 1.5: 1.5^2 e^(3 - 4.5) = 0.502043 up, 1.5^3 e^(2 - 3) = 1.241594 down."""
    for advantage, weight in ((2.0, 0.5020429), (-2.0, 1.2415931)):
        inputs = inputs_of([[0.4, 0.3, 0.0]], [[0.2, 0.4, 0.0]], [[advantage]])
        loss, gradient, clipped = loss_and_gradient("vespo", inputs)
        assert gradient == pytest.approx([-weight * advantage] * 2, rel=1e-6)
        assert loss == pytest.approx([-weight * advantage * math.log(p) for p in (0.4, 0.3)], rel=1e-6)
        assert not any(clipped)


def test_sapo_by_hand() -> None:
    """sigmoid(0) = 1/2 gives 4/t / 2; at ratio 2 and t = 1 the gate is 4 * 0.731059, its slope 0.786448."""
    inputs = inputs_of([[0.2, 0.4], [0.2, 0.4]], [[0.2, 0.2], [0.2, 0.2]], [[1.0], [-1.0]])
    loss, gradient, clipped = loss_and_gradient("sapo", inputs)
    low = 4 / 1.05 / (1 + math.exp(-1.05))
    slope = 4 * math.exp(-1.05) / (1 + math.exp(-1.05)) ** 2
    assert loss == pytest.approx([-2.0, -4 * 0.7310585786, 2 / 1.05, low])
    assert gradient == pytest.approx([-1.0, -2 * 0.7864477330, 1.0, 2 * slope])  # d ratio / d log pi = ratio
    assert not any(clipped)
    assert loss_and_gradient("sapo", inputs, tau=2.0)[0][0] == pytest.approx(-1.0)
    whole = replace(inputs, advantages=inputs.advantages.int())  # the temperatures are no integers for that
    assert loss_and_gradient("sapo", whole)[0] == pytest.approx(loss)


def test_gmpo_by_hand() -> None:
    """Log ratios 0.6, 0.1 and -0.7: up, the first is held at 0.4; down, the last at -0.4."""
    old = [[0.3, 0.3, 0.3, 0.0]]
    new = [[0.3 * math.exp(log) for log in (0.6, 0.1, -0.7)] + [0.0]]
    cases = (2.0, (0.4, 0.1, -0.7), [True, False, False]), (-2.0, (0.6, 0.1, -0.4), [False, False, True])
    for advantage, logs, clipped in cases:
        mean = math.exp(sum(logs) / 3)
        loss, gradient, found = loss_and_gradient("gmpo", inputs_of(new, old, [[advantage]]), cliprange=0.4)
        assert loss == pytest.approx([-advantage * mean] * 3)
        # Each of the three equal losses has a third of the mean's derivative at a token that is not held.
        assert gradient == pytest.approx([0.0 if is_held else -advantage * mean for is_held in clipped])
        assert found == clipped


def test_luspo_is_gspo_summed_over_each_response() -> None:
    assert LOSSES["luspo"] is LOSSES["gspo"]
    config = AlgorithmConfig(loss="luspo")
    assert config.loss_aggregation == "sequence_sum"
    assert config.clip_epsilons == (3e-4, 4e-4)


LOW, HIGH, DUAL = 0.2, 0.5, 2.0
CLIPS = ["grpo_clip", "dual_clip", "gspo"]


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
