"""The whole objective: its added terms, and invariances of loss and gradient, for every loss."""

from dataclasses import replace
from typing import get_args

import pytest
import torch

from grpo_ray.config.losses import LOSS_RECORDS
from grpo_ray.objectives import (
    RATIO_LOSSES,
    Aggregation,
    LossType,
    Objective,
    kl_estimate,
    loss_denominator,
    policy_gradient_step,
)

LOSS_TYPES, AGGREGATIONS = get_args(LossType), get_args(Aggregation)
NAN = float("nan")
CLIPPING = set(RATIO_LOSSES) - {"unclipped", "sapo", "vespo"}
RESPONSE_LOSSES = {name for name, record in LOSS_RECORDS.items() if record.is_of_responses}


def ranges(loss_type: LossType) -> tuple[float, ...]:
    """Return a clip range of 0.8 to 1.3 for the losses that have one."""
    return () if LOSS_RECORDS[loss_type].epsilons is None else (0.2, 0.3)


def example(batch: int = 6, seq: int = 5, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(batch, seq, generator=generator, dtype=torch.float64)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        # The shift clips some whole responses, on either side, for GSPO.
        "policy_log_probs": old
        + 0.4 * noise(batch, seq)
        + 0.6 * torch.tensor([[1], [-1], [0], [1], [-1], [0]]),
        "response_mask": torch.arange(seq) < torch.tensor([[5], [2], [1], [4], [3], [5]]),
        "advantages": noise(batch, 1),
        "old_log_probs": old,
        "weights": 0.3 + torch.rand(batch, seq, generator=generator, dtype=torch.float64),
        "reference_log_probs": old + 0.3 * noise(batch, seq),
        "entropy": noise(batch, seq).square(),
        "row_tokens": torch.tensor([8, 8, 8, 12, 12, 12]),  # of two prompts, for `prompt_mean` alone
    }


PER_TOKEN = [name for name in example() if name not in ("advantages", "response_mask", "row_tokens")]


def full(loss_type: LossType, aggregation: Aggregation = "sequence_mean") -> Objective:
    """Return an objective with every term."""
    dual_clip = 1.3 if loss_type == "grpo_clip" else None
    terms = {"dual_clip": dual_clip, "kl_coefficient": 0.5, "entropy_bonus": 0.1}
    return Objective(loss_type, aggregation, *ranges(loss_type), **terms)


def step(tensors, objective, denominator=None):
    """Return the loss, gradients of every differentiable input, and sums."""
    leaves = {
        name: tensor.detach().clone().requires_grad_(tensor.is_floating_point())
        for name, tensor in tensors.items()
        if name != "row_tokens" or objective.aggregation == "prompt_mean"
    }
    if denominator is None:
        mask = tensors["response_mask"].bool()
        if objective.needs_old_log_probs:
            mask = mask & tensors["old_log_probs"].isfinite()
        denominator = loss_denominator(objective.aggregation, len(mask), int(mask.sum()), 8, num_prompts=2)
    loss, sums = policy_gradient_step(**leaves, objective=objective, denominator=denominator)
    loss.backward()
    assert not any(value.requires_grad for value in sums.values())
    return (
        loss.item(),
        {name: leaf.grad for name, leaf in leaves.items()},
        {k: v.item() for k, v in sums.items()},
    )


def assert_same(actual, expected, rows=slice(None)):
    """Compare two results of `step`, taking the rows of `expected` in the given order."""
    assert actual[0] == pytest.approx(expected[0], rel=1e-12)
    for name in ("policy_log_probs", "entropy"):
        torch.testing.assert_close(actual[1][name], expected[1][name][rows], rtol=1e-9, atol=1e-12)
    assert actual[2] == pytest.approx(expected[2], rel=1e-12)


@pytest.mark.parametrize("loss_type", RATIO_LOSSES)
def test_at_ratio_one_every_ratio_loss_has_the_gradient_of_reinforce(loss_type):
    tensors = example()
    tensors["old_log_probs"] = tensors["policy_log_probs"].clone()
    del tensors["weights"]
    gradients = []
    for name in (loss_type, "reinforce_with_baseline"):
        _, grads, sums = step(tensors, Objective(name, "sequence_mean"))
        gradients.append(grads["policy_log_probs"])
        assert sums.get("num_clipped", 0) == 0
    assert (gradients[0] - gradients[1]).norm() / gradients[1].norm() < 1e-6
    plain = (
        -tensors["advantages"] * tensors["response_mask"] / tensors["response_mask"].sum(1, keepdim=True) / 6
    )
    torch.testing.assert_close(gradients[1], plain)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_padding_and_what_is_in_it_change_nothing(loss_type, aggregation):
    tensors, objective = example(), full(loss_type, aggregation)
    expected = step(tensors, objective)
    assert (0 < expected[2].get("num_clipped", 0) < 20) is (loss_type in CLIPPING)
    for garbage in (7.0, NAN, float("inf"), float("-inf")):
        padded = dict(tensors, response_mask=torch.nn.functional.pad(tensors["response_mask"], (0, 3)))
        for name in PER_TOKEN:
            filled = tensors[name].masked_fill(~tensors["response_mask"], garbage)
            padded[name] = torch.nn.functional.pad(filled, (0, 3), value=garbage)
        loss, grads, sums = step(padded, objective)
        for name in ("policy_log_probs", "entropy"):
            assert torch.equal(grads[name][~padded["response_mask"]], torch.zeros(28, dtype=torch.float64))
            grads[name] = grads[name][:, :5]
        assert_same((loss, grads, sums), expected)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_order_of_the_batch_changes_nothing(loss_type, aggregation):
    tensors, order = example(), torch.tensor([4, 0, 5, 2, 1, 3])
    shuffled = {name: tensor[order] for name, tensor in tensors.items()}
    objective = full(loss_type, aggregation)
    assert_same(step(shuffled, objective), step(tensors, objective), order)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_split_into_micro_batches_changes_nothing(loss_type, aggregation):
    tensors, objective = example(), full(loss_type, aggregation)
    denominator = loss_denominator(aggregation, 6, 20, max_tokens=8, num_prompts=2)
    loss, grads, sums = step(tensors, objective, denominator)
    parts = [
        step({n: t[rows] for n, t in tensors.items()}, objective, denominator)
        for rows in ([0], [1, 2, 3], [4, 5])
    ]
    joined = {name: torch.cat([part[1][name] for part in parts]) for name in ("policy_log_probs", "entropy")}
    added = {name: sum(part[2][name] for part in parts) for name in sums}
    assert_same((sum(part[0] for part in parts), joined, added), (loss, grads, sums))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_an_empty_row_lets_nothing_through(loss_type):
    tensors, objective = example(), full(loss_type)
    expected = step({name: tensor[:5] for name, tensor in tensors.items()}, objective, 6.0)
    tensors["response_mask"][5] = False
    for name in (*PER_TOKEN, "advantages"):
        tensors[name][5] = NAN
    loss, grads, sums = step(tensors, objective, 6.0)
    for name in ("policy_log_probs", "entropy"):
        assert torch.equal(grads[name][5], torch.zeros(5, dtype=torch.float64))
        grads[name] = grads[name][:5]
    assert_same((loss, grads, sums), expected)


@pytest.mark.parametrize("loss_type", RATIO_LOSSES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_token_without_old_logprob_leaves_every_term(loss_type, aggregation):
    tensors, objective = example(), full(loss_type, aggregation)
    tensors["old_log_probs"][0, 3] = float("-inf")
    masked = dict(tensors, response_mask=tensors["response_mask"].clone())
    masked["response_mask"][0, 3] = False
    result = step(tensors, objective)
    assert_same(result, step(masked, objective))
    assert result[2]["num_tokens"] == 19


@pytest.mark.parametrize("loss_type", ["no_baseline", "reinforce_with_baseline"])
def test_losses_without_a_ratio_ignore_old_log_probs(loss_type):
    tensors, objective = example(), full(loss_type)
    expected = step(tensors, objective)
    tensors["old_log_probs"][:] = NAN
    assert_same(step(tensors, objective), expected)
    assert expected[2]["num_tokens"] == 20
    assert "num_clipped" not in expected[2]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_terms_add_up_and_only_the_first_is_weighted(loss_type, estimator):
    tensors = example()
    plain = Objective(loss_type, "constant", *ranges(loss_type)[:1])
    full_objective = replace(plain, kl_coefficient=0.5, kl_estimator=estimator, entropy_bonus=0.1)
    mask = tensors["response_mask"]
    loss, grads, _ = step(tensors, full_objective, 1.0)

    policy = tensors["policy_log_probs"].clone().requires_grad_()
    per_token = torch.zeros(6, 5, dtype=torch.float64)
    for row, column in mask.nonzero().tolist():  # the policy-gradient term alone, one token at a time
        only = torch.zeros_like(mask)
        only[row, column] = True
        rows = {name: tensors[name] for name in ("advantages", "old_log_probs")}
        if loss_type in RESPONSE_LOSSES:  # a token's depends on the others of its response
            own = mask & (torch.arange(6) == row)[:, None]
            per_token[row, column] = plain.policy_gradient_loss(policy, own, **rows)[0][row, column]
        else:
            value, _ = policy_gradient_step(policy, only, objective=plain, denominator=1.0, **rows)
            per_token[row, column] = value
    kl = kl_estimate(policy, tensors["reference_log_probs"], estimator)
    expected = ((per_token * tensors["weights"] + 0.5 * kl - 0.1 * tensors["entropy"]) * mask).sum()
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(grads["policy_log_probs"], policy.grad)
    torch.testing.assert_close(grads["entropy"], -0.1 * mask.double())
    assert grads["weights"] is None
    assert grads["reference_log_probs"] is None
    assert grads["old_log_probs"] is None


def test_kl_and_entropy_by_hand():
    """With two tokens of weight 0, (2 * k2 - 3 * entropy) / 4 remains."""
    loss, sums = policy_gradient_step(
        torch.tensor([[-1.0, -2.0, -9.0]]),
        torch.tensor([[1, 1, 0]]),
        objective=Objective(
            "reinforce_with_baseline", "constant", kl_coefficient=2.0, kl_estimator="k2", entropy_bonus=3.0
        ),
        denominator=4.0,
        advantages=torch.tensor([[5.0]]),
        weights=torch.zeros(1, 3),
        reference_log_probs=torch.tensor([[-1.5, -1.0, -1.0]]),
        entropy=torch.tensor([[0.5, 0.25, 8.0]]),
    )
    assert loss.item() == pytest.approx((2 * (0.125 + 0.5) - 3 * 0.75) / 4)
    assert sums["num_tokens"].item() == 2
    assert sums["kl_k1_sum"].item() == pytest.approx(-0.5)
    assert sums["kl_k3_sum"].item() == pytest.approx((0.606530660 + 0.5 - 1) + (2.718281828 - 2))
    assert sums["kl_k3_sum"].dtype == torch.float64


def test_a_reference_only_measured_changes_no_gradient():
    tensors, objective = example(), Objective("grpo_clip", "token_mean")
    expected = step(
        {n: t for n, t in tensors.items() if n not in ("reference_log_probs", "entropy")}, objective
    )
    loss, grads, sums = step(tensors, objective)
    assert loss == expected[0]
    assert torch.equal(grads["policy_log_probs"], expected[1]["policy_log_probs"])
    assert grads["entropy"] is None
    assert set(sums) - set(expected[2]) == {"kl_k1_sum", "kl_k3_sum"}


def test_nan_at_a_live_token_is_not_hidden():
    for name in ("policy_log_probs", "weights", "reference_log_probs", "entropy", "advantages"):
        tensors = example()
        tensors[name][0, 0] = NAN
        loss, _ = policy_gradient_step(**tensors, objective=full("gspo"), denominator=6.0)
        assert loss.isnan(), name


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_nan_outside_the_mask_never_enters_the_backward_pass(loss_type):
    tensors = example()
    for name in PER_TOKEN:
        tensors[name][1, 3] = NAN
    with torch.autograd.detect_anomaly():
        step(tensors, full(loss_type))


def test_which_losses_need_old_log_probs():
    needing = {name for name in LOSS_TYPES if Objective(name, "constant").needs_old_log_probs}
    assert needing == set(RATIO_LOSSES)
    plain = Objective("reinforce_with_baseline", "constant", kl_estimator="unbiased")
    assert not plain.needs_old_log_probs  # without a coefficient
    assert replace(plain, kl_coefficient=0.1).needs_old_log_probs


def test_unbiased_kl_is_weighted_by_the_ratio_also_without_a_ratio_in_the_loss():
    tensors = example()
    objective = Objective("reinforce_with_baseline", "constant", kl_coefficient=0.5, kl_estimator="unbiased")
    loss, grads, _ = step(tensors, objective, 1.0)
    mask, policy = tensors["response_mask"], tensors["policy_log_probs"].clone().requires_grad_()
    d = tensors["reference_log_probs"] - policy
    kl = (policy - tensors["old_log_probs"]).exp() * (d.exp() - d - 1)
    expected = ((-tensors["advantages"] * policy * tensors["weights"] + 0.5 * kl) * mask).sum()
    expected.backward()
    assert loss == pytest.approx(expected.item())
    torch.testing.assert_close(grads["policy_log_probs"], policy.grad)


@pytest.mark.parametrize(
    ("loss_type", "missing"),
    [
        ("gspo", "old_log_probs"),
        ("gspo", "reference_log_probs"),
        ("gspo", "entropy"),
        ("gspo", "advantages"),
        ("unclipped", "old_log_probs"),
        ("no_baseline", "raw_rewards"),
    ],
)
def test_a_missing_argument_is_named(loss_type, missing):
    tensors = example()
    tensors["advantages" if missing == "raw_rewards" else missing] = None
    with pytest.raises(ValueError, match=f"needs {missing}"):
        policy_gradient_step(**tensors, objective=full(loss_type), denominator=6.0)


@pytest.mark.parametrize("name", [*PER_TOKEN[1:], "response_mask"])
def test_an_argument_of_another_shape_is_named(name):
    tensors = example()
    tensors[name] = tensors[name][:1]
    with pytest.raises(ValueError, match=f"{name} has shape"):
        policy_gradient_step(**tensors, objective=full("cispo"), denominator=6.0)
