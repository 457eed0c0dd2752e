"""From rewards to advantages: shaping of the rewards, then comparison within each group."""

from collections.abc import Callable, Sequence
from typing import get_args

import torch
from torch import Tensor

from grpo_ray.config.algorithm import AdvantageKind, Std


def overlong_penalties(lengths: Tensor, max_tokens: int, buffer_tokens: int, penalty: float) -> Tensor:
    """Return the soft overlong punishment of each response, scaled by `penalty`.

    (DAPO arXiv:2503.14476, Section 3.4, Eq. 13.) It is 0 up to `max_tokens - buffer_tokens` tokens, falls
    linearly from there to `-penalty` at `max_tokens`, and stays at `-penalty` beyond. Add it to the rewards
    before computing advantages.

    Args:
        lengths: `[G]`, response lengths in tokens.
        max_tokens: the maximum response length (the paper's L_max).
        buffer_tokens: the paper's L_cache; 0 turns the punishment off.
        penalty: at least 0, in units of reward (1 in the paper).

    Returns:
        `[G]` float32, none above 0.

    Raises:
        ValueError: buffer_tokens is outside [0, max_tokens], or the penalty is negative.
    """
    if not 0 <= buffer_tokens <= max_tokens:
        raise ValueError(f"buffer_tokens must be between 0 and max_tokens ({max_tokens}), got {buffer_tokens}")
    if not penalty >= 0:
        raise ValueError(f"penalty must be at least 0, got {penalty}")
    lengths = lengths.float()  # exact up to 2^24 tokens
    if buffer_tokens == 0:
        return lengths.new_zeros(lengths.shape)
    return penalty * ((max_tokens - buffer_tokens - lengths) / buffer_tokens).clamp(-1.0, 0.0)


def group_advantages(
    rewards: Tensor,
    kind: AdvantageKind = "mean_std",
    *,
    advantage_eps: float = 1e-6,
    std: Std = "sample",
) -> Tensor:
    """Compare each response's reward with the rewards of its group.

    - `mean_std`: `(r - mean) / (std + eps)`, GRPO's outcome supervision (DeepSeekMath arXiv:2402.03300,
      Section 4.1.2).
    - `mean`: `r - mean` (Dr. GRPO arXiv:2503.20783, Section 3.2).
    - `leave_one_out`: `r` minus the mean of the other G - 1, which is `G / (G - 1) * (r - mean)` (RLOO,
      Ahmadian et al. arXiv:2402.14740).
    - `max_only`: `r` where it equals the group's maximum, else 0 (the "max" deltas of Stanford CS336's
      lecture on policy gradients). Not centred.
    - `raw`: `r`. Not centred.

    Args:
        rewards: `[groups, G]`, floating point, one group per row.
        kind: one of `AdvantageKind`.
        advantage_eps: added to the std, in units of reward (`mean_std`).
        std: `sample` divides the squares by G - 1, `population` by G (`mean_std`).

    Returns:
        `[groups, G]`. The first three kinds give exactly 0 for a group of equal rewards, including
        a group of size 1 (rounding in the mean alone would leave 1e-8, and dividing by the std would blow it
        up).

    Raises:
        ValueError: rewards are not two-dimensional, kind or std is unknown, or `leave_one_out` is applied to
            groups of size 1.
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
    """Score every response and convert the rewards to advantages, group by group.

    Args:
        reward_fn: maps `(response, ground_truth)` to a dict with `reward`, `format_reward`, `answer_reward`.
        rollout_responses: n responses; every `group_size` consecutive ones answer the same prompt.
        repeated_ground_truths: n ground truths, that of each prompt repeated `group_size` times.
        group_size: G, completions per prompt.
        advantage_eps: see `group_advantages`.
        normalize_by_std: use `mean_std` of `group_advantages`, otherwise `mean`.

    Returns:
        Advantages `[n]`, raw rewards `[n]` (both float32), and metrics of the batch as floats.

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
    """Return `[groups]` bool: true where all rewards `[groups, G]` of the group are the same."""
    return (rewards == rewards[:, :1]).all(dim=1)


def _column(scores: list[dict[str, float]], key: str) -> Tensor:
    return torch.tensor([score[key] for score in scores], dtype=torch.float32)
