"""Token losses: by hand, at the corners of the clip, and against finite differences."""

import math
from typing import get_args

import pytest
import torch
from local_runs import make_config

from grpo_ray.objectives import (
    RATIO_LOSSES,
    AlgorithmConfig,
    LossType,
    Objective,
    compute_grpo_clip_loss,
    compute_naive_policy_gradient_loss,
    compute_policy_gradient_loss,
    grpo_microbatch_train_step,
)
from grpo_ray.objectives.checking import acts_without_advantage, notices_on_loss

CLIPRANGE = 0.2


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        ("no_baseline", 3.0),
        ("reinforce_with_baseline", 0.5),
        ("unclipped", -0.5 * math.exp(2)),
        ("grpo_clip", -0.6),
        ("gspo", -0.6),
        ("cispo", 0.6),
    ],
)
def test_each_loss_type_takes_its_own_arguments(loss_type, expected):
    # log pi = -1; reward 3, advantage 0.5, old logprob so low that the ratio is clipped to 1.2
    loss, metadata = compute_policy_gradient_loss(
        torch.tensor([[-1.0]]),
        loss_type,
        raw_rewards=torch.tensor([[3.0]]),
        advantages=torch.tensor([[0.5]]),
        old_log_probs=torch.tensor([[-3.0]]),
        cliprange=CLIPRANGE,
        response_mask=torch.ones(1, 1),
    )
    torch.testing.assert_close(loss, torch.tensor([[expected]]))
    assert set(metadata) == ({"clipped", "clip_fraction", "ratio"} if loss_type in RATIO_LOSSES else set())


@pytest.mark.parametrize("loss_type", ["grpo_clip", "gspo", "cispo"])
def test_the_optional_bounds_reach_the_loss(loss_type):
    """Two tokens with ratio 3 and advantages 1 and -1."""
    arguments = {
        "policy_log_probs": torch.full((2, 1), math.log(3.0)),
        "loss_type": loss_type,
        "advantages": torch.tensor([[1.0], [-1.0]]),
        "old_log_probs": torch.zeros(2, 1),
        "cliprange": 0.2,
        "response_mask": torch.ones(2, 1),
    }
    scale = math.log(3.0) if loss_type == "cispo" else 1.0
    negative = 1.2 if loss_type == "cispo" else 3.0
    loss, _ = compute_policy_gradient_loss(**arguments)
    torch.testing.assert_close(loss, torch.tensor([[-1.2], [negative]]) * scale)
    negative = 1.5 if loss_type == "cispo" else 3.0
    loss, _ = compute_policy_gradient_loss(**arguments, cliprange_high=0.5)
    torch.testing.assert_close(loss, torch.tensor([[-1.5], [negative]]) * scale)
    negative = {"grpo_clip": 2.0, "gspo": 3.0, "cispo": 1.2}[loss_type]
    loss, _ = compute_policy_gradient_loss(**arguments, dual_clip=2.0)
    torch.testing.assert_close(loss, torch.tensor([[-1.2], [negative]]) * scale)


@pytest.mark.parametrize(
    ("loss_type", "missing"),
    [
        ("no_baseline", "raw_rewards"),
        ("reinforce_with_baseline", "advantages"),
        *((loss_type, name) for loss_type in RATIO_LOSSES for name in ("advantages", "old_log_probs")),
        ("gspo", "response_mask"),
    ],
)
def test_a_missing_argument_is_named(loss_type, missing):
    column = torch.ones(1, 1)
    arguments = {
        "raw_rewards": column,
        "advantages": column,
        "old_log_probs": column,
        "cliprange": 0.2,
        "response_mask": column,
    }
    with pytest.raises(ValueError, match=f"'{loss_type}' needs {missing}"):
        compute_policy_gradient_loss(column, loss_type, **(arguments | {missing: None}))


@pytest.mark.parametrize("loss_type", get_args(LossType))
def test_what_is_left_out_is_as_in_a_configuration(loss_type):
    """By the function, by an Objective of the name alone, and by that of a configuration."""
    torch.manual_seed(0)
    policy, old = -3 * torch.rand(4, 5), -3 * torch.rand(4, 5)
    tensors = torch.ones(4, 5, dtype=torch.bool), torch.tensor([[1.0], [-1.0], [0.5], [-2.0]])
    configured = Objective.from_config(AlgorithmConfig(loss=loss_type))
    assert Objective(loss_type) == configured
    expected, _ = configured.policy_gradient_loss(policy, *tensors, old)
    mask, advantages = tensors
    arguments = {
        "raw_rewards": advantages,
        "advantages": advantages,
        "old_log_probs": old,
        "response_mask": mask,
    }
    loss, _ = compute_policy_gradient_loss(policy, loss_type, **arguments)
    assert torch.equal(loss, expected)


def test_options_reach_the_loss_and_misspelt_ones_are_refused():
    policy, old = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, -1.1]])
    arguments = {"advantages": torch.ones(1, 1), "old_log_probs": old}
    found = [
        compute_policy_gradient_loss(policy, "dppo_tv", **arguments, delta=delta)[1]["clipped"].tolist()
        for delta in (0.01, 0.1, 0.5)
    ]
    assert found == [[[True, True]], [[True, False]], [[False, False]]]
    misspelt = Objective("dppo_tv", loss_options={"dleta": 0.01})
    with pytest.raises(
        ValueError, match=r"dppo_tv has no option 'dleta'; it takes cap, delta, delta_high, kl_tau"
    ):
        misspelt.policy_gradient_loss(policy, torch.ones(1, 2), torch.ones(1, 1), old)
    with pytest.raises(ValueError, match="has no option 'tua'"):
        compute_policy_gradient_loss(policy, "sapo", **arguments, tua=1.0)
    with pytest.raises(ValueError, match="has no option 'tua'"):
        grpo_microbatch_train_step(policy, torch.ones(1, 2), 1, "sapo", **arguments, tua=1.0)


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
    ],
    ids=str,
)
def test_an_objective_refuses_what_it_would_ignore(arguments, message):
    with pytest.raises(ValueError, match=message):
        Objective(**({"loss_type": "grpo_clip"} | arguments))


def test_an_unknown_loss_type_lists_the_allowed():
    with pytest.raises(ValueError, match=rf"'ppo'.*{', '.join(get_args(LossType))}"):
        compute_policy_gradient_loss(torch.ones(1, 1), "ppo")


@pytest.mark.parametrize("shape", [(3,), (1, 3), (3, 2), (1, 1)])
def test_advantages_that_would_broadcast_along_seq_are_refused(shape):
    log_probs = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"\[3, 1\]"):
        compute_naive_policy_gradient_loss(torch.ones(shape), log_probs)
    with pytest.raises(ValueError, match=r"advantages must be .*\[3, 1\]"):
        compute_grpo_clip_loss(torch.ones(shape), log_probs, log_probs, CLIPRANGE)


@pytest.mark.parametrize("loss_type", get_args(LossType))
def test_only_a_pull_to_the_old_policy_acts_where_the_advantage_is_zero(loss_type):
    assert not acts_without_advantage(Objective(loss_type))
    if loss_type in ("dppo_tv", "dppo_kl", "ipo"):
        assert acts_without_advantage(Objective(loss_type, loss_options={"kl_tau": 1e-3}))


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
