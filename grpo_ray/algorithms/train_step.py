"""One micro-batch: per-token loss, mask, scalar. The Learner and the public function share one core."""

from torch import Tensor

from grpo_ray.algorithms.aggregation import Aggregation, aggregate_loss
from grpo_ray.algorithms.losses import LossType, compute_policy_gradient_loss


def policy_gradient_step(
    policy_log_probs: Tensor,
    response_mask: Tensor,
    *,
    loss_type: LossType,
    aggregation: Aggregation,
    denominator: float,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A micro-batch's share of the batch's loss; the caller calls `backward()`.

    `grpo_clip` drops every token whose old logprob is not finite: it leaves the sum and the count. Neither
    such tokens nor those outside the mask get a gradient, whatever value they hold.

    Args:
        policy_log_probs: `[batch, seq]`, differentiated.
        response_mask: `[batch, seq]`, bool or 0/1, true where the token is the response's.
        loss_type: see `compute_policy_gradient_loss`, as for the four optional arguments.
        aggregation: see `aggregate_loss`.
        denominator: the WHOLE batch's count (`loss_denominator`); for `token_mean`, of the tokens that
            are kept.
        raw_rewards: `[batch, 1]`.
        advantages: `[batch, 1]`.
        old_log_probs: `[batch, seq]`.
        cliprange: eps of GRPO-Clip.

    Returns:
        The scalar loss, and scalar tensors to be summed over micro-batches: `num_tokens` (kept by mask and
        old logprobs) and, for `grpo_clip`, `num_clipped` of them.

    Raises:
        ValueError: see `compute_policy_gradient_loss` and `aggregate_loss`; or the mask's shape is not the
            log-probabilities'.
    """
    if response_mask.shape != policy_log_probs.shape:
        raise ValueError(
            f"response_mask has shape {tuple(response_mask.shape)}, "
            f"policy_log_probs {tuple(policy_log_probs.shape)}; they must be the same"
        )
    mask = response_mask.bool()
    if loss_type == "grpo_clip" and old_log_probs is not None:
        mask = mask & old_log_probs.isfinite()
        old_log_probs = old_log_probs.masked_fill(~mask, 0.0)
    # Filled before the loss too: in exp's backward pass even a zero gradient times NaN would be NaN.
    per_token_loss, details = compute_policy_gradient_loss(
        policy_log_probs.masked_fill(~mask, 0.0), loss_type, raw_rewards, advantages, old_log_probs, cliprange
    )
    metadata = {"num_tokens": mask.sum()}
    if "clipped" in details:
        metadata["num_clipped"] = (details["clipped"] & mask).sum()
    return aggregate_loss(per_token_loss, mask, aggregation, denominator), metadata


def grpo_microbatch_train_step(
    policy_log_probs: Tensor,
    response_mask: Tensor,
    gradient_accumulation_steps: int,
    loss_type: LossType,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and `backward()` of one of `gradient_accumulation_steps` micro-batches of equal size.

    The loss is each response's masked mean, averaged over the micro-batch, divided by the number of
    micro-batches. It is `policy_gradient_step` with `sequence_mean`; the arguments are its arguments.

    Returns:
        The scalar loss, detached (its graph is spent), and the metadata of `policy_gradient_step`.

    Raises:
        ValueError: see `policy_gradient_step`; or `gradient_accumulation_steps` is below 1.
    """
    if gradient_accumulation_steps < 1:
        raise ValueError(f"gradient_accumulation_steps must be at least 1, got {gradient_accumulation_steps}")
    loss, metadata = policy_gradient_step(
        policy_log_probs,
        response_mask,
        loss_type=loss_type,
        aggregation="sequence_mean",
        denominator=policy_log_probs.shape[0] * gradient_accumulation_steps,
        raw_rewards=raw_rewards,
        advantages=advantages,
        old_log_probs=old_log_probs,
        cliprange=cliprange,
    )
    loss.backward()
    return loss.detach(), metadata
