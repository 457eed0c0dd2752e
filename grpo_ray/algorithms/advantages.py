"""From rewards to advantages: each reward is compared with the other rewards of its own group."""

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

AdvantageKind = Literal["mean_std", "mean", "leave_one_out", "max_only", "raw"]
Std = Literal["sample", "population"]


def group_advantages(
    rewards: Tensor,
    kind: AdvantageKind = "mean_std",
    *,
    advantage_eps: float = 1e-6,
    std: Std = "sample",
) -> Tensor:
    """What each response is worth beside the others of its group.

    - `mean_std`: `(r - mean) / (std + eps)`, GRPO's outcome supervision (DeepSeekMath arXiv:2402.03300,
      Section 4.1.2).
    - `mean`: `r - mean` (Dr. GRPO arXiv:2503.20783, Section 3.2).
    - `leave_one_out`: `r` minus the mean of the other G - 1, which is `G / (G - 1) * (r - mean)` (RLOO,
      Ahmadian et al. arXiv:2402.14740).
    - `max_only`: `r` where it equals the group's maximum, else 0 (the "max" deltas of Stanford CS336's
      lecture on policy gradients). Not centred.
    - `raw`: `r`. Not centred.

    Args:
        rewards: `[groups, G]`, floating point, one group a row.
        kind: one of `AdvantageKind`.
        advantage_eps: added to the std, in units of reward (`mean_std`).
        std: `sample` divides the squares by G - 1, `population` by G (`mean_std`).

    Returns:
        `[groups, G]`. The first three are exactly 0 throughout a group whose rewards are all equal, one of
        size 1 included (rounding in the mean alone would leave 1e-8, and the std would blow it up).

    Raises:
        ValueError: rewards are not two-dimensional, kind or std is unknown, or `leave_one_out` is asked of
            groups of 1.
    """
    if rewards.ndim != 2:
        raise ValueError(f"rewards must be [groups, G], got shape {tuple(rewards.shape)}")
    if kind not in get_args(AdvantageKind):
        raise ValueError(f"unknown advantage kind {kind!r}; allowed: {', '.join(get_args(AdvantageKind))}")
    if std not in get_args(Std):
        raise ValueError(f"unknown std {std!r}; allowed: {', '.join(get_args(Std))}")
    if kind == "raw":
        return rewards.clone()
    if kind == "max_only":
        return rewards.masked_fill(rewards < rewards.amax(dim=1, keepdim=True), 0.0)
    group_size = rewards.shape[1]
    advantages = rewards - rewards.mean(dim=1, keepdim=True)
    if kind == "leave_one_out":
        if group_size < 2:
            raise ValueError("leave_one_out compares with the rest of the group: G must be at least 2, got 1")
        advantages = advantages * (group_size / (group_size - 1))
    elif kind == "mean_std" and group_size > 1:
        deviation = rewards.std(dim=1, keepdim=True, correction=1 if std == "sample" else 0)
        advantages = advantages / (deviation + advantage_eps)
    return advantages.masked_fill(_has_equal_rewards(rewards)[:, None], 0.0)


def compute_group_normalized_rewards(
    reward_fn: Callable[[str, str], dict[str, float]],
    rollout_responses: Sequence[str],
    repeated_ground_truths: Sequence[str],
    group_size: int,
    advantage_eps: float,
    normalize_by_std: bool,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Score every response and turn the rewards into advantages, group by group.

    Args:
        reward_fn: `(response, ground_truth)` to a dict with `reward`, `format_reward`, `answer_reward`.
        rollout_responses: n responses; each run of `group_size` answers the same prompt.
        repeated_ground_truths: n ground truths, each prompt's repeated `group_size` times.
        group_size: G, completions a prompt.
        advantage_eps: see `group_advantages`.
        normalize_by_std: `mean_std` of `group_advantages`, else `mean`.

    Returns:
        advantages `[n]`, raw rewards `[n]` (both float32), and metrics of the batch as floats.

    Raises:
        ValueError: the two lists differ in length, or n is not a positive multiple of `group_size`.
    """
    num_responses = len(rollout_responses)
    if num_responses != len(repeated_ground_truths):
        raise ValueError(
            f"{num_responses} rollout_responses but {len(repeated_ground_truths)} repeated_ground_truths; "
            "repeat each ground truth group_size times"
        )
    if group_size < 1 or num_responses < 1 or num_responses % group_size:
        raise ValueError(
            f"{num_responses} rollout_responses do not fill groups of group_size {group_size}: "
            "give a positive multiple of it"
        )
    scores = [reward_fn(*pair) for pair in zip(rollout_responses, repeated_ground_truths, strict=True)]
    raw_rewards = _column(scores, "reward")
    groups = raw_rewards.view(-1, group_size)
    kind: AdvantageKind = "mean_std" if normalize_by_std else "mean"
    advantages = group_advantages(groups, kind, advantage_eps=advantage_eps).flatten()
    metadata = {
        "reward/mean": raw_rewards.mean().item(),
        "reward/std": raw_rewards.std().item() if num_responses > 1 else 0.0,
        "reward/min": raw_rewards.min().item(),
        "reward/max": raw_rewards.max().item(),
        "reward/format": _column(scores, "format_reward").mean().item(),
        "reward/answer": _column(scores, "answer_reward").mean().item(),
        "rollout/zero_variance_groups": float(_has_equal_rewards(groups).sum().item()),
    }
    return advantages, raw_rewards, metadata


def _has_equal_rewards(rewards: Tensor) -> Tensor:
    """`[groups, G]` to `[groups]` bool: every reward of the group is the same."""
    return (rewards == rewards[:, :1]).all(dim=1)


def _column(scores: list[dict[str, float]], key: str) -> Tensor:
    return torch.tensor([score[key] for score in scores], dtype=torch.float32)
