"""Ratios of probabilities from differences of log-probabilities, kept finite."""

from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8: far outside any clip range, and finite in float32 and bfloat16


def clamped_exp(log_ratio: Tensor) -> Tensor:
    """`exp` of log ratios of any shape, clamped to [-20, 20]; beyond that its gradient is 0. NaN stays NaN."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
