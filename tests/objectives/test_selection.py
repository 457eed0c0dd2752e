"""Tokens that are left out or held back to control the entropy, by hand."""

from typing import get_args

import numpy as np
import pytest
import torch

from grpo_ray.config.algorithm import AlgorithmConfig, TokenSelection
from grpo_ray.objectives import SELECTIONS, Objective, policy_gradient_step

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
