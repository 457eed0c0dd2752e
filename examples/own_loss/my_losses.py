"""SPO, a loss with a penalty in place of the clip, and a correction that drops responses."""

import torch
from torch import Tensor

from grpo_ray.objectives import CorrectionInputs, RatioInputs


def spo(inputs: RatioInputs, *, cliprange: float, strength: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    """Return `-(ratio * A - strength * |A| / (2 eps) * (ratio - 1)^2)`.

    With strength 1 its optimum is where GRPO-Clip stops, at a ratio of 1 + eps (1 - eps where A < 0): Xie
    et al., ICML 2025, arXiv:2401.16025.
    """
    ratio = inputs.log_ratio.clamp(-20, 20).exp()
    penalty = strength * inputs.advantages.abs() / (2 * cliprange) * (ratio - 1).square()
    is_outside = (ratio - 1).abs() > cliprange
    return penalty - ratio * inputs.advantages, {"clipped": is_outside, "ratio": ratio.detach()}


def agreeing(inputs: CorrectionInputs, *, limit: float) -> tuple[Tensor, Tensor]:
    """Drop responses with a token of which the two log-probabilities are more than `limit` apart."""
    is_dropped = (inputs.log_ratio.abs() > limit).any(dim=1, keepdim=True)  # [batch, 1]
    return torch.where(is_dropped, 0.0, 1.0), is_dropped
