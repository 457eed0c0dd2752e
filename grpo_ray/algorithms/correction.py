"""Importance weights: correction for tokens sampled from another distribution than the one being trained.

The ratio is `exp(learner - behaviour)` of log-probabilities, its log clamped to [-20, 20]. Behaviour logprobs
are those that the sampler assigned; tokens without a finite one have no ratio.
"""

from typing import get_args

import torch
from torch import Tensor

from grpo_ray.algorithms.logprobs import clamped_exp
from grpo_ray.config.algorithm import Correction


@torch.no_grad()
def importance_weights(
    learner_log_probs: Tensor,
    behaviour_log_probs: Tensor,
    mask: Tensor,
    correction: Correction,
    cap: float,
    band: tuple[float, float],
) -> Tensor:
    """Return the factors of the token losses that correct for the sampler's distribution.

    - `none`: 1 at every token, masked or not.
    - `truncate_token`: `min(ratio, cap)` (truncated importance sampling, Ionides 2008; between sampler and
      Learner: Yao, Liu et al. 2025, fengyao.notion.site/off-policy-rl).
    - `truncate_sequence`: `min(product of the response's ratios, cap)`, the same for all of its tokens.
    - `mask_band`: the ratio if it is within the band, bounds included, else 0 (IcePop, Ring-1T
      arXiv:2510.18855).

    Args:
        learner_log_probs: `[batch, seq]`, nats.
        behaviour_log_probs: `[batch, seq]`, nats.
        mask: `[batch, seq]`, bool or 0/1.
        correction: one of `Correction`.
        cap: the largest truncated weight.
        band: (low, high) of `mask_band`.

    Returns:
        `[batch, seq]`, without gradient. Except for `none`, it is 0 at tokens outside the mask or without a
        finite behaviour logprob, and a response's product excludes such tokens.

    Raises:
        ValueError: the correction is unknown.
    """
    if correction == "none":
        return torch.ones_like(learner_log_probs)
    log_ratio, mask = _log_ratio(learner_log_probs, behaviour_log_probs, mask)
    if correction == "truncate_token":
        weights = clamped_exp(log_ratio).clamp(max=cap)
    elif correction == "truncate_sequence":
        weights = clamped_exp(log_ratio.sum(dim=1, keepdim=True)).clamp(max=cap).expand_as(log_ratio)
    elif correction == "mask_band":
        ratio, (low, high) = clamped_exp(log_ratio), band
        weights = ratio.masked_fill((ratio < low) | (ratio > high), 0.0)
    else:
        raise ValueError(f"unknown correction {correction!r}; allowed: {', '.join(get_args(Correction))}")
    return weights.masked_fill(~mask, 0.0)


@torch.no_grad()
def correction_sums(
    weights: Tensor, behaviour_log_probs: Tensor, mask: Tensor, correction: Correction, cap: float
) -> dict[str, Tensor]:
    """Summarise the weights of a micro-batch; add up the sums, and take the smallest and largest.

    Args:
        weights: `[batch, seq]`, of `importance_weights` with this correction and cap.
        behaviour_log_probs: `[batch, seq]`; tokens where it is not finite have no weight.
        mask: `[batch, seq]`, bool or 0/1.
        correction: one of `Correction`, not `none`.
        cap: the largest truncated weight.

    Returns:
        Scalars: `num_corrected` (tokens that have a weight), `num_limited` (those truncated, or masked by the
        band), `correction_weight_sum`, `_min` and `_max`; nothing if no token has a weight.
    """
    mask = mask.bool() & behaviour_log_probs.isfinite()
    weights = weights[mask]
    if not weights.numel():
        return {}
    # In the weights' own dtype, to which the cap was rounded.
    is_limited = weights == 0 if correction == "mask_band" else weights >= cap
    weights = weights.double()
    return {
        "num_corrected": mask.sum(),
        "num_limited": is_limited.sum(),
        "correction_weight_sum": weights.sum(),
        "correction_weight_min": weights.min(),
        "correction_weight_max": weights.max(),
    }


@torch.no_grad()
def effective_sample_sums(
    learner_log_probs: Tensor, behaviour_log_probs: Tensor, mask: Tensor
) -> dict[str, Tensor]:
    """Return sums over the tokens' ratios; added up over micro-batches, they go to `effective_sample_fraction`.

    Args:
        learner_log_probs: `[batch, seq]`, nats.
        behaviour_log_probs: `[batch, seq]`, nats; tokens where it is not finite are excluded.
        mask: `[batch, seq]`, bool or 0/1.

    Returns:
        Scalars: `weight_sum` and `weight_square_sum` (float64) of the untruncated ratios, and `num_weights`
        (int64).
    """
    log_ratio, mask = _log_ratio(learner_log_probs.double(), behaviour_log_probs.double(), mask)
    weights = clamped_exp(log_ratio).masked_fill(~mask, 0.0)
    return {
        "weight_sum": weights.sum(),
        "weight_square_sum": weights.square().sum(),
        "num_weights": mask.sum(),
    }


def effective_sample_fraction(weight_sum: float, weight_square_sum: float, num_weights: float) -> float:
    """Return Kish's effective sample size divided by the sample size, `(sum w)^2 / (n * sum w^2)` (Kish 1965).

    Args:
        weight_sum: sum of the weights.
        weight_square_sum: sum of their squares.
        num_weights: n, at least 1.

    Returns:
        From 1 / n to 1; 1 if all weights are equal.
    """
    return float(weight_sum) ** 2 / (float(num_weights) * float(weight_square_sum))


def _log_ratio(learner_log_probs: Tensor, behaviour_log_probs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return log ratios `[batch, seq]`, 0 where a token has none, and the mask of tokens that have one."""
    mask = mask.bool() & behaviour_log_probs.isfinite()
    return (learner_log_probs - behaviour_log_probs).masked_fill(~mask, 0.0), mask
