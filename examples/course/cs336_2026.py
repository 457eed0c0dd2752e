"""The GRPO functions of Stanford CS336's assignment 5, spring 2026, under the handout's names and arguments.

The functions of spring 2025 are in `grpo_ray.objectives`, two under the same names with other arguments.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from grpo_ray.config.losses import LossType
from grpo_ray.objectives import train_step
from grpo_ray.objectives.advantages import group_advantages
from grpo_ray.objectives.aggregation import aggregate_loss, masked_normalize
from grpo_ray.objectives.logprobs import check_shape, get_response_log_probs, tokenize_prompt_and_output

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Baseline = Literal["mean", "none"]
AdvantageNormalizer = Literal["std", "none", "mean"]
ReweightingMethod = Literal["none", "noclip", "grpo", "gspo"]
LossNormalization = Literal["sequence", "constant"]
RewardFn = Callable[[str, str], Mapping[str, float]]

LOSSES: dict[ReweightingMethod, LossType] = {
    "none": "reinforce_with_baseline", "noclip": "unclipped", "grpo": "grpo_clip", "gspo": "gspo",
}  # fmt: skip


def compute_rollout_rewards(
    reward_fn: RewardFn, rollout_responses: Sequence[str], repeated_ground_truths: Sequence[str]
) -> tuple[Tensor, dict[str, float]]:
    """Score n responses by `reward_fn(response, ground_truth)`, a dict as the rewards of grpo_ray return it.

    Returns:
        Rewards `[n]` float32, and metrics: `reward/mean`, `/std`, `/min`, `/max`, `/format`, `/answer`.

    Raises:
        ValueError: there are no responses, the number of ground truths differs, or a reward is not such a dict
            of finite numbers.
    """
    if not 0 < (n := len(rollout_responses)) == len(repeated_ground_truths):
        raise ValueError(f"{n} rollout_responses and {len(repeated_ground_truths)} repeated_ground_truths")
    scores = [reward_fn(*pair) for pair in zip(rollout_responses, repeated_ground_truths, strict=True)]
    keys = ("reward", "format_reward", "answer_reward")
    for score in scores:
        if not (
            isinstance(score, Mapping) and {*keys} <= {*score} and all(math.isfinite(score[k]) for k in keys)
        ):
            raise ValueError(f"reward_fn returned {score!r}, not a dict with finite {', '.join(keys)}")
    columns = torch.tensor([[score[key] for key in keys] for score in scores], dtype=torch.float32).T
    means = {"reward/format": columns[1].mean().item(), "reward/answer": columns[2].mean().item()}
    return columns[0], _summary("reward", columns[0]) | means


def compute_group_normalized_rewards(
    raw_rewards: Tensor,
    group_size: int,
    baseline: Baseline = "mean",
    advantage_eps: float = 1e-6,
    advantage_normalizer: AdvantageNormalizer = "std",
) -> tuple[Tensor, dict[str, float]]:
    """Compute `(r - baseline) / (normalizer + advantage_eps)` within each group.

    Args:
        raw_rewards: `[n]`; every `group_size` consecutive ones belong to the same prompt.
        baseline: subtract the group's `mean`, or nothing.
        advantage_normalizer: divide by the group's sample `std`, by its `mean` (MaxRL), or not at all.

    Returns:
        Advantages `[n]`, and metrics: `advantage/mean`, `/std`, `/min` and `/max`. A group of equal rewards has
        exactly 0 with the baseline `mean`; without a baseline, `std` divides it by `advantage_eps` alone.

    Raises:
        ValueError: the rewards are no floats or do not fill groups; `std` with groups of one; the normalizer
            `mean` with a negative reward (a negative mean would turn every advantage around); an unknown name.
    """
    _check_choice("baseline", baseline, Baseline)
    _check_choice("advantage_normalizer", advantage_normalizer, AdvantageNormalizer)
    if raw_rewards.ndim != 1 or group_size < 1 or not len(raw_rewards) or len(raw_rewards) % group_size:
        raise ValueError(f"raw_rewards {list(raw_rewards.shape)} must be [n], in groups of {group_size=}")
    if not raw_rewards.is_floating_point():
        raise ValueError(f"raw_rewards are {raw_rewards.dtype}; give floats: raw_rewards.float()")
    groups = raw_rewards.view(-1, group_size)
    advantages = group_advantages(groups, "mean" if baseline == "mean" else "raw")
    if advantage_normalizer == "std":
        if group_size < 2:
            raise ValueError("advantage_normalizer 'std' needs a group_size of at least 2, got 1")
        advantages = advantages / (groups.std(dim=1, keepdim=True) + advantage_eps)
    elif advantage_normalizer == "mean":
        if (groups < 0).any():
            raise ValueError("advantage_normalizer 'mean' needs rewards of at least 0; use 'std' or 'none'")
        advantages = advantages / (groups.mean(dim=1, keepdim=True) + advantage_eps)
    if baseline == "mean":  # with an advantage_eps of 0 it would be 0 / 0
        advantages = advantages.masked_fill((groups == groups[:, :1]).all(dim=1, keepdim=True), 0.0)
    return advantages.flatten(), _summary("advantage", advantages)


def compute_policy_gradient_loss(
    raw_rewards_or_advantages: Tensor,
    policy_log_probs: Tensor,
    importance_reweighting_method: ReweightingMethod = "none",
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
    response_mask: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the policy-gradient loss per token.

    Args:
        raw_rewards_or_advantages: `[batch]` or `[batch, 1]`, one scalar per response.
        policy_log_probs: `[batch, seq]`, differentiated.
        old_log_probs: `[batch, seq]`, required by all methods but `none`.
        cliprange: epsilon on both sides, required by `grpo` and `gspo`.
        response_mask: `[batch, seq]`, bool or 0/1; required by `gspo`. If given, log-probabilities outside it
            (even NaN) have no effect on the gradient, and the loss there means nothing.

    Returns:
        The loss `[batch, seq]`, and for all methods but `none` the details of `losses.py`, in which
        `clip_fraction` is a mean over the mask (0 if that is empty; without a mask over all tokens).

    Raises:
        ValueError: an argument that the method needs is missing, a shape differs, or the name is unknown.
    """
    method, weights = importance_reweighting_method, raw_rewards_or_advantages
    _check_method(method, old_log_probs, cliprange)
    weights = weights.unsqueeze(1) if weights.ndim == 1 else weights
    for name, tensor in (("response_mask", response_mask), ("old_log_probs", old_log_probs)):
        if tensor is not None:  # before they are filled: that would broadcast them
            check_shape(name, tensor, policy_log_probs)
    if response_mask is not None:  # filled first: in the backward pass of exp, 0 times NaN would be NaN
        response_mask = response_mask.bool()
        policy_log_probs = policy_log_probs.masked_fill(~response_mask, 0.0)
        old_log_probs = None if old_log_probs is None else old_log_probs.masked_fill(~response_mask, 0.0)
    loss, details = train_step.compute_policy_gradient_loss(
        policy_log_probs, LOSSES[method], None, weights, old_log_probs, cliprange, response_mask
    )
    if "clipped" in details and response_mask is not None:
        details["clip_fraction"] = (details["clipped"] & response_mask).sum() / response_mask.sum().clamp(min=1)
    return loss, details


def aggregate_loss_across_microbatch(
    per_token_policy_gradient_loss: Tensor,
    mask: Tensor,
    loss_normalization: LossNormalization = "sequence",
    normalization_constant: float | None = None,
) -> Tensor:
    """Reduce losses `[batch, seq]` under the mask `[batch, seq]` (bool or 0/1) to one scalar.

    `sequence` is the mean over rows of each row's mean, which is 0 for a row without tokens. `constant` is the
    sum over all tokens, divided by the constant (in Dr. GRPO the whole batch's responses x maximum tokens).

    Raises:
        ValueError: the constant is missing or not positive, the shapes differ, or the name is unknown.
    """
    _check_normalization(loss_normalization, normalization_constant)
    loss = per_token_policy_gradient_loss
    check_shape("mask", mask, loss)
    if loss_normalization == "constant" and normalization_constant is not None:
        return aggregate_loss(loss, mask, "constant", normalization_constant)
    return aggregate_loss(loss, mask, "sequence_mean", loss.shape[0])


def grpo_train_step(
    model: torch.nn.Module,
    tokenizer: "PreTrainedTokenizerBase",
    optimizer: torch.optim.Optimizer,
    gradient_accumulation_steps: int,
    max_grad_norm: float | None,
    reward_fn: RewardFn,
    repeated_prompts: Sequence[str],
    rollout_responses: Sequence[str],
    repeated_ground_truths: Sequence[str],
    group_size: int,
    baseline: Baseline = "mean",
    advantage_eps: float = 1e-6,
    advantage_normalizer: AdvantageNormalizer = "std",
    importance_reweighting_method: ReweightingMethod = "none",
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
    loss_normalization: LossNormalization = "sequence",
    normalization_constant: float | None = None,
) -> tuple[Tensor, dict[str, Tensor | float]]:
    """Update the model once, in the mode (train or eval) that it is in, on a batch of rollouts.

    The gradient is that of the whole batch, into however many micro-batches it is divided: they differ by one
    row at most, and there are never more than rows. A response without tokens adds nothing to the loss, and
    `sequence` still counts it. Earlier gradients are discarded, and none are left. `max_grad_norm` limits the
    norm of the whole gradient (None: no limit); `old_log_probs` has the shape of the whole batch as
    `tokenize_prompt_and_output` pads it.

    Returns:
        The batch's loss without gradient, and metadata: the metrics of the rewards and the advantages,
        `grad_norm` before clipping, and over all response tokens `token_entropy` (nats) and `clip_fraction`.

    Raises:
        ValueError: see the functions above; or gradient_accumulation_steps is below 1.
    """
    if gradient_accumulation_steps < 1:
        raise ValueError(f"gradient_accumulation_steps must be at least 1, got {gradient_accumulation_steps}")
    _check_method(importance_reweighting_method, old_log_probs, cliprange)
    normalization = loss_normalization, normalization_constant
    _check_normalization(*normalization)
    batch = tokenize_prompt_and_output(repeated_prompts, rollout_responses, tokenizer)
    if importance_reweighting_method != "none" and old_log_probs is not None:
        check_shape("old_log_probs", old_log_probs, batch["labels"])
        batch["old_log_probs"] = old_log_probs
    rewards, metadata = compute_rollout_rewards(reward_fn, rollout_responses, repeated_ground_truths)
    batch["advantages"], advantage_metadata = compute_group_normalized_rewards(
        rewards, group_size, baseline, advantage_eps, advantage_normalizer
    )
    device = next(model.parameters()).device
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    num_rows, num_tokens = len(rewards), batch["response_mask"].sum().clamp(min=1)
    batch_loss, token_entropy, clip_fraction = torch.zeros(3, device=device)
    optimizer.zero_grad(set_to_none=True)
    for rows in torch.arange(num_rows, device=device).tensor_split(min(gradient_accumulation_steps, num_rows)):
        part = {name: tensor[rows] for name, tensor in batch.items()}
        mask, old = part["response_mask"], part.get("old_log_probs")
        output = get_response_log_probs(model, part["input_ids"], part["labels"], return_token_entropy=True)
        per_token_loss, details = compute_policy_gradient_loss(
            part["advantages"], output["log_probs"], importance_reweighting_method, old, cliprange, mask
        )
        loss = aggregate_loss_across_microbatch(per_token_loss, mask, *normalization)
        loss = loss * (len(rows) / num_rows) if loss_normalization == "sequence" else loss
        torch.autograd.backward(loss)
        batch_loss += loss.detach()
        token_entropy += masked_normalize(output["token_entropy"], mask) / num_tokens
        clip_fraction += details.get("clip_fraction", 0.0) * mask.sum() / num_tokens
    limit = torch.inf if max_grad_norm is None else max_grad_norm
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    measured = {"grad_norm": grad_norm, "token_entropy": token_entropy, "clip_fraction": clip_fraction}
    return batch_loss, {**metadata, **advantage_metadata, **measured}


def _summary(name: str, values: Tensor) -> dict[str, float]:
    std = values.std() if values.numel() > 1 else values.new_zeros(())
    statistics = {"mean": values.mean(), "std": std, "min": values.min(), "max": values.max()}
    return {f"{name}/{key}": value.item() for key, value in statistics.items()}


def _check_method(method: str, old_log_probs: Tensor | None, cliprange: float | None) -> None:
    _check_choice("importance_reweighting_method", method, ReweightingMethod)
    if method != "none" and old_log_probs is None:
        raise ValueError(f"importance_reweighting_method {method!r} needs old_log_probs")
    if method in ("grpo", "gspo") and cliprange is None:
        raise ValueError(f"importance_reweighting_method {method!r} needs cliprange")


def _check_normalization(normalization: str, constant: float | None) -> None:
    _check_choice("loss_normalization", normalization, LossNormalization)
    if normalization == "constant" and (constant is None or not constant > 0):
        raise ValueError(f"loss_normalization 'constant' needs normalization_constant > 0, got {constant}")


def _check_choice(name: str, value: str, choices: object) -> None:
    if value not in get_args(choices):
        raise ValueError(f"unknown {name} {value!r}; allowed: {', '.join(get_args(choices))}")
