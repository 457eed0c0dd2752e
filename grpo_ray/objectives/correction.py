"""Corrections for tokens sampled from another distribution than the one being trained.

Each is a function of `CorrectionInputs` that returns factors of the token losses and where it intervened. The
ratio is `exp(learner - behaviour)` of log-probabilities, its log clamped to [-20, 20]. Behaviour logprobs are
those that the sampler assigned; tokens without a finite one have no ratio. A response is a row; the branches of
an episode are rows of their own, each judged by itself.
"""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import torch
from pydantic import NonNegativeFloat
from torch import Tensor

from grpo_ray.config.algorithm import Correction
from grpo_ray.objectives.inputs import CorrectionFn, CorrectionInputs, named, ones, row_mean, row_sum
from grpo_ray.objectives.logprobs import check_rows, clamped_exp

Band = tuple[float | None, float | None]  # None: no bound


def truncate_token(
    inputs: CorrectionInputs, *, cap: float = 2.0, floor: NonNegativeFloat = 0.0
) -> tuple[Tensor, Tensor]:
    """Weigh each token by `min(max(ratio, floor), cap)`: truncated importance sampling.

    (Ionides 2008; between sampler and Learner: Yao, Liu et al. 2025, fengyao.notion.site/off-policy-rl.)
    """
    return _truncated(inputs.ratio, cap, floor)


def truncate_sequence(
    inputs: CorrectionInputs, *, cap: float = 2.0, floor: NonNegativeFloat = 0.0
) -> tuple[Tensor, Tensor]:
    """Weigh all tokens of a response by `min(max(product of its ratios, floor), cap)`."""
    return _truncated(_product(inputs), cap, floor)


def mask_band(inputs: CorrectionInputs, *, band: Band = (0.5, 5.0)) -> tuple[Tensor, Tensor]:
    """Weigh each token by its ratio within the band, bounds included, and by 0 outside.

    (IcePop, Ring-1T arXiv:2510.18855.)
    """
    is_outside = _outside(inputs.ratio, band)
    return inputs.ratio.masked_fill(is_outside, 0.0), is_outside


def mask_product(inputs: CorrectionInputs, *, band: Band = (None, 3.0)) -> tuple[Tensor, Tensor]:
    """Drop responses of which the ratios' product is outside the band: masked importance sampling.

    (Liu, Li et al. 2025, "When Speed Kills Stability". With `truncate_sequence` and the same bound the kept
    responses have the product as their weight: TRL's `sequence_mask`.)
    """
    return _dropping(inputs, _outside(_product(inputs), band))


def mask_geometric(inputs: CorrectionInputs, *, band: Band = (0.999, 1.001)) -> tuple[Tensor, Tensor]:
    """Drop responses of which the ratios' geometric mean is outside the band, whatever their length.

    (The same source; unlike the product it does not favour short responses. The band is that of the author's
    presets in verl.)
    """
    return _dropping(inputs, _outside(clamped_exp(row_mean(inputs.log_ratio, inputs.mask)), band))


def veto(inputs: CorrectionInputs, *, threshold: NonNegativeFloat = 1e-4) -> tuple[Tensor, Tensor]:
    """Drop responses with a token of a ratio below the threshold: one catastrophic outlier spoils the response.

    (The same source.)
    """
    return _dropping(inputs, (inputs.ratio < threshold).any(dim=1, keepdim=True))


def opsm(inputs: CorrectionInputs, *, delta: NonNegativeFloat) -> tuple[Tensor, Tensor]:
    """Drop responses with a negative advantage that drifted: mean log(sampler / current policy) above delta.

    (Off-policy sequence masking, DeepSeek-V3.2 arXiv:2512.02556, Section 3.1.) Where turns have advantages of
    their own, only turns with a negative one are dropped.

    Args:
        delta: nats per token.
    """
    return _dropping(inputs, (inputs.advantages < 0) & (row_mean(inputs.drift, inputs.mask) > delta))


CORRECTIONS: dict[Correction, CorrectionFn] = {
    "truncate_token": truncate_token,
    "truncate_sequence": truncate_sequence,
    "mask_band": mask_band,
    "mask_product": mask_product,
    "mask_geometric": mask_geometric,
    "veto": veto,
    "opsm": opsm,
}


def correction_function(name: str) -> CorrectionFn:
    """Return the correction with this name, or import `module:function`."""
    return named(name, CORRECTIONS, "algorithm.off_policy_correction")


@torch.no_grad()
def correction_weights(
    inputs: CorrectionInputs, corrections: Sequence[tuple[CorrectionFn, Mapping[str, Any]]]
) -> tuple[Tensor, Tensor]:
    """Multiply the weights of several corrections, given with their keyword arguments.

    Returns:
        The factors of the token losses, `[batch, seq]`, 0 at tokens outside the inputs' mask; and bool `[batch,
        seq]`, true where a correction truncated or masked.
    """
    weights, is_limited = ones(inputs), torch.zeros_like(inputs.mask)
    for correction, options in corrections:
        own, is_own = correction(inputs, **options)
        check_rows("the weights of a correction", own, weights)
        weights, is_limited = weights * own, is_limited | is_own
    return weights.masked_fill(~inputs.mask, 0.0), is_limited


@torch.no_grad()
def correction_sums(weights: Tensor, is_limited: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Summarise the weights of a micro-batch; add up the sums, and take the smallest and largest.

    Args:
        weights, is_limited: `[batch, seq]`, of `correction_weights`.
        mask: bool `[batch, seq]`, the tokens to count, each with a weight.

    Returns:
        Scalars: `num_corrected` (tokens), `num_limited` (those truncated or masked), `num_dropped` (those of
        weight 0), `correction_weight_sum`, `_min` and `_max`; nothing if no token is counted.
    """
    weights = weights[mask].double()
    if not weights.numel():
        return {}
    return {
        "num_corrected": mask.sum(),
        "num_limited": (is_limited & mask).sum(),
        "num_dropped": (weights == 0).sum(),
        "correction_weight_sum": weights.sum(),
        "correction_weight_min": weights.min(),
        "correction_weight_max": weights.max(),
    }


def _product(inputs: CorrectionInputs) -> Tensor:
    """Return the product of each response's ratios, `[batch, 1]`."""
    return clamped_exp(row_sum(inputs.log_ratio, inputs.mask))


def _truncated(ratio: Tensor, cap: float, floor: float) -> tuple[Tensor, Tensor]:
    weights = ratio.clamp(floor, cap)
    return weights, (weights >= cap) | (ratio < floor)  # in the weights' own dtype, to which the cap is rounded


def _outside(ratio: Tensor, band: Band) -> Tensor:
    low, high = band
    return (ratio < (0.0 if low is None else low)) | (ratio > (inf if high is None else high))


def _dropping(inputs: CorrectionInputs, is_dropped: Tensor) -> tuple[Tensor, Tensor]:
    return ones(inputs).masked_fill(is_dropped, 0.0), is_dropped
