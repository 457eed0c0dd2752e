"""One micro-batch: the tokens that are counted, what the library refuses, and what it works out."""

import math
from typing import get_args

import numpy as np
import pytest
import torch

from grpo_ray.config.algorithm import AlgorithmConfig, TokenSelection
from grpo_ray.objectives import (
    SELECTIONS,
    CorrectionInputs,
    Objective,
    get_response_log_probs,
    grpo_microbatch_train_step,
    loss_denominator,
    policy_gradient_step,
)

CLIPRANGE = 0.2


def test_clipped_tokens_are_told_apart_by_their_bound_and_counted_where_there_is_an_advantage():
    """Ratios 1, e^0.5, 1/e, e^2: with A > 0 the upper bound clips, with A < 0 the lower, with A = 0 none."""
    for advantage, dual_clip, expected in (
        (1, None, (4, 2, 0)),
        (-1, None, (4, 1, 1)),
        (-1, 4, (4, 2, 1)),
        (0, None, (0, 0, 0)),
    ):
        _, sums = policy_gradient_step(
            torch.tensor([[0.0, 0.5, -1.0, 2.0]]),
            torch.ones(1, 4),
            objective=Objective("grpo_clip", "constant", CLIPRANGE, dual_clip=dual_clip),
            denominator=4,
            advantages=torch.tensor([[float(advantage)]]),
            old_log_probs=torch.zeros(1, 4),
        )
        assert tuple(sums[name].item() for name in ("num_ratios", "num_clipped", "num_clipped_low")) == expected


def test_bad_arguments_are_refused():
    log_probs, column = torch.zeros(2, 3), torch.ones(2, 1)
    with pytest.raises(ValueError, match="gradient_accumulation_steps"):
        grpo_microbatch_train_step(log_probs, torch.ones(2, 3), 0, "no_baseline", raw_rewards=column)
    with pytest.raises(ValueError, match="response_mask"):
        grpo_microbatch_train_step(log_probs, torch.ones(2, 1), 1, "no_baseline", raw_rewards=column)


# ---- what the library refuses instead of ignoring it, and what it works out ----


def test_a_selection_without_weights_is_refused():
    arguments = {"advantages": torch.ones(1, 1), "old_log_probs": torch.zeros(1, 2)}
    objective = Objective("grpo_clip", selection="top_entropy")
    with pytest.raises(ValueError, match=r"top_entropy acts through weights.*SELECTIONS\['top_entropy'\]"):
        policy_gradient_step(torch.zeros(1, 2), torch.ones(1, 2), objective=objective, **arguments)


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
    with pytest.raises(ValueError, match=r"needs an entropy with a gradient.*compute_entropy\(logits\)"):
        policy_gradient_step(
            found["log_probs"], torch.ones(1, 3),
            objective=Objective("reinforce_with_baseline", entropy_bonus=1.0), **arguments,
        )  # fmt: skip
    with torch.no_grad():  # a loss to look at
        policy_gradient_step(
            found["log_probs"].detach(), torch.ones(1, 3),
            objective=Objective("reinforce_with_baseline", entropy_bonus=1.0), **arguments,
        )  # fmt: skip


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean", "sequence_sum"])
def test_without_a_denominator_the_rows_are_the_whole_batch(aggregation):
    """Four rows of 1, 2, 2 and 0 tokens."""
    mask, row_tokens = torch.tensor([[1, 0], [1, 1], [1, 1], [0, 0]]), torch.tensor([3, 3, 2, 2])
    policy, advantages = torch.rand(4, 2), torch.tensor([[1.0], [-2.0], [3.0], [0.5]])
    arguments = {"advantages": advantages, "objective": Objective("reinforce_with_baseline", aggregation)}
    expected = policy_gradient_step(
        policy, mask, denominator=loss_denominator(aggregation, 4, 5, 8, 4), **arguments
    )
    assert policy_gradient_step(policy, mask, **arguments)[0] == expected[0]
    with pytest.raises(ValueError, match="row_tokens needs denominator"):
        policy_gradient_step(policy, mask, row_tokens=row_tokens, **arguments)
    with pytest.raises(ValueError, match="penalties need old_log_probs"):
        policy_gradient_step(policy, mask, penalties=torch.ones(4, 2), **arguments)


def test_a_constant_needs_its_denominator():
    objective = Objective("reinforce_with_baseline", "constant")
    with pytest.raises(ValueError, match=r"maximum response length.*loss_denominator\('constant'"):
        policy_gradient_step(
            torch.zeros(1, 2), torch.ones(1, 2), objective=objective, advantages=torch.ones(1, 1)
        )


def test_a_token_without_an_old_logprob_has_no_penalty_in_a_loss_without_a_ratio():
    policy = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    loss, _ = policy_gradient_step(
        policy, torch.ones(1, 2), objective=Objective("reinforce_with_baseline"), advantages=torch.ones(1, 1),
        old_log_probs=torch.tensor([[math.nan, -1.5]]), penalties=torch.tensor([[3.0, 3.0]]),
    )  # fmt: skip
    assert loss.item() == (1.0 + 2.0 + 3 * 0.5) / 2
    loss.backward()
    assert policy.grad.tolist() == [[-0.5, (-1.0 - 3.0) / 2]]


LOG_PROBS = np.array([-1.0, -3.0, -1.0, -3.0], np.float32)  # mean -2
ADVANTAGES = np.array([3.0, 1.0, -1.0, -3.0], np.float32)  # mean 0
# Covariances (log p + 2) * A: 3, -1, -1, 3


def select(name: str, entropies: np.ndarray | None = None, seed: int = 0, **options: float):
    entropies = np.zeros(4, np.float32) if entropies is None else entropies
    rng = np.random.default_rng(seed)
    weights, penalties = SELECTIONS[name](LOG_PROBS, entropies, ADVANTAGES, rng, **options)
    return weights.tolist(), penalties.tolist()


def test_the_table_has_every_name_of_the_configuration() -> None:
    assert ("none", *SELECTIONS) == get_args(TokenSelection)


def test_top_entropy_keeps_a_share_of_the_tokens() -> None:
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


def test_a_penalty_is_added_by_hand() -> None:
    """2 * |0.5| + 3 * |-0.25|, over 4; its gradient has the sign of the drift."""
    policy = torch.tensor([[-0.5, -1.25, -1.0]], requires_grad=True)
    loss, _ = policy_gradient_step(
        policy,
        torch.ones(1, 3),
        objective=Objective("reinforce_with_baseline", "constant", selection="kl_cov"),
        denominator=4.0,
        advantages=torch.zeros(1, 1),
        old_log_probs=torch.tensor([[-1.0, -1.0, torch.nan]]),
        penalties=torch.tensor([[2.0, 3.0, 5.0]]),
    )
    assert loss.item() == pytest.approx((2 * 0.5 + 3 * 0.25) / 4)
    loss.backward()
    assert policy.grad is not None
    assert policy.grad.tolist() == [[0.5, -0.75, 0.0]]


def test_a_penalty_that_is_always_0_is_refused() -> None:
    for size in (None, 4):
        sizes = {"prompts_per_step": 2, "samples_per_prompt": 2, "train_batch_size": size}
        with pytest.raises(ValueError, match=r"kl_cov` penalizes .* set old_log_probs to `behaviour`"):
            AlgorithmConfig(token_selection="kl_cov", old_log_probs="proximal", **sizes)
    AlgorithmConfig(token_selection="kl_cov", old_log_probs="proximal", epochs_per_batch=2)
