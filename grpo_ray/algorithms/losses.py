"""Per-token policy-gradient losses: `[batch, seq]` log-probabilities in, `[batch, seq]` losses out.

Every loss is the negative of the objective to be maximised, without masking (see aggregation.py).
All log-probabilities are natural logs.
"""

from typing import Literal, TypeVar, get_args

import torch
from torch import Tensor

T = TypeVar("T")
LossType = Literal["no_baseline", "reinforce_with_baseline", "grpo_clip"]

MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8: far outside any clip range, and finite in float32 and bfloat16


def compute_naive_policy_gradient_loss(raw_rewards_or_advantages: Tensor, policy_log_probs: Tensor) -> Tensor:
    """REINFORCE: `-A * log pi` at every token (Williams 1992; DeepSeekMath arXiv:2402.03300, Appendix A.1).

    Args:
        raw_rewards_or_advantages: `[batch, 1]`, one scalar a response.
        policy_log_probs: `[batch, seq]`.

    Returns:
        `[batch, seq]`.

    Raises:
        ValueError: the rewards are not a `[batch, 1]` column.
    """
    _check_column("raw_rewards_or_advantages", raw_rewards_or_advantages, policy_log_probs)
    return -raw_rewards_or_advantages * policy_log_probs


def compute_grpo_clip_loss(
    advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor, cliprange: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """GRPO-Clip: `-min(ratio * A, clip(ratio, 1 - eps, 1 + eps) * A)`, `ratio = pi / pi_old`.

    PPO's clipped surrogate (arXiv:1707.06347, Eq. 7) with a group's advantages, which is GRPO's objective
    (arXiv:2402.03300, Eq. 3) at one token, without its KL term. The log ratio is clamped to
    [-20, 20] before exp, so that no token can overflow; beyond that its gradient is 0.

    Args:
        advantages: `[batch, 1]`.
        policy_log_probs: `[batch, seq]`, differentiated.
        old_log_probs: `[batch, seq]`, never differentiated.
        cliprange: eps.

    Returns:
        The loss `[batch, seq]`, and without gradient: `clipped` (`[batch, seq]` bool: the clipped branch is
        strictly the smaller, so the token has no gradient), `clip_fraction` (scalar, its mean over all
        tokens, padding included) and `ratio` (`[batch, seq]`).

    Raises:
        ValueError: advantages are not a `[batch, 1]` column, or old_log_probs have another shape.
    """
    _check_column("advantages", advantages, policy_log_probs)
    if old_log_probs.shape != policy_log_probs.shape:
        raise ValueError(
            f"old_log_probs have shape {tuple(old_log_probs.shape)}, "
            f"policy_log_probs {tuple(policy_log_probs.shape)}; they must be the same"
        )
    log_ratio = policy_log_probs - old_log_probs.detach()
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1.0 - cliprange, 1.0 + cliprange) * advantages
    is_clipped = (clipped < unclipped).detach()
    metadata = {"clipped": is_clipped, "clip_fraction": is_clipped.float().mean(), "ratio": ratio.detach()}
    return -torch.minimum(unclipped, clipped), metadata


def compute_policy_gradient_loss(
    policy_log_probs: Tensor,
    loss_type: LossType,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The per-token loss named by `loss_type`, from the arguments which that loss needs.

    `no_baseline` needs raw_rewards, `reinforce_with_baseline` advantages, and `grpo_clip` advantages,
    old_log_probs and cliprange; what a loss does not need is ignored.

    Args:
        policy_log_probs: `[batch, seq]`.
        loss_type: one of `LossType`.
        raw_rewards: `[batch, 1]`.
        advantages: `[batch, 1]`.
        old_log_probs: `[batch, seq]`.
        cliprange: eps of GRPO-Clip.

    Returns:
        The loss `[batch, seq]` and its metadata (empty but for `grpo_clip`).

    Raises:
        ValueError: an argument that the loss needs is missing, or the loss type is unknown.
    """
    if loss_type == "no_baseline":
        rewards = _required("raw_rewards", raw_rewards, loss_type)
        return compute_naive_policy_gradient_loss(rewards, policy_log_probs), {}
    if loss_type == "reinforce_with_baseline":
        advantages = _required("advantages", advantages, loss_type)
        return compute_naive_policy_gradient_loss(advantages, policy_log_probs), {}
    if loss_type == "grpo_clip":
        return compute_grpo_clip_loss(
            _required("advantages", advantages, loss_type),
            policy_log_probs,
            _required("old_log_probs", old_log_probs, loss_type),
            _required("cliprange", cliprange, loss_type),
        )
    raise ValueError(f"unknown loss_type {loss_type!r}; allowed: {', '.join(get_args(LossType))}")


def _required(name: str, value: T | None, loss_type: str) -> T:
    if value is None:
        raise ValueError(f"loss_type {loss_type!r} needs {name}")
    return value


def _check_column(name: str, column: Tensor, policy_log_probs: Tensor) -> None:
    """A `[batch]` vector would broadcast along the wrong axis whenever batch == seq, so refuse it."""
    if column.shape != (policy_log_probs.shape[0], 1):
        raise ValueError(
            f"{name} must be [batch, 1] = [{policy_log_probs.shape[0]}, 1], got {list(column.shape)}"
        )
