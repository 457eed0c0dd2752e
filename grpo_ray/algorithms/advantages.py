"""From rewards to advantages: each reward is compared with the other rewards of its own group."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def group_advantages(rewards: Tensor, advantage_eps: float, normalize_by_std: bool) -> Tensor:
    """Centre the rewards of each group and, if asked, divide by the group's standard deviation.

    With the std this is GRPO's outcome supervision, `A = (r - mean) / (std + eps)` (DeepSeekMath
    arXiv:2402.03300, Section 4.1.2); without it, `A = r - mean` (Dr. GRPO arXiv:2503.20783,
    Section 3.2). The std is the sample's (divided by G - 1).

    Args:
        rewards: `[groups, G]`, floating point, one group a row.
        advantage_eps: added to the std, in units of reward.
        normalize_by_std: divide by the std.

    Returns:
        `[groups, G]`. Exactly 0 throughout a group whose rewards are all equal, one of size 1 included
        (rounding in the mean alone would leave 1e-8, and the std would blow it up).

    Raises:
        ValueError: rewards are not two-dimensional.
    """
    if rewards.ndim != 2:
        raise ValueError(f"rewards must be [groups, G], got shape {tuple(rewards.shape)}")
    advantages = rewards - rewards.mean(dim=1, keepdim=True)
    if normalize_by_std and rewards.shape[1] > 1:
        advantages = advantages / (rewards.std(dim=1, keepdim=True) + advantage_eps)
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
        normalize_by_std: see `group_advantages`.

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
    advantages = group_advantages(groups, advantage_eps, normalize_by_std).flatten()
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
