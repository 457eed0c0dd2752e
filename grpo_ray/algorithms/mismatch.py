"""How far the sampler's log-probabilities are from the Learner's for the same tokens."""

import torch
from torch import Tensor


@torch.no_grad()
def logprob_mismatch(learner_log_probs: Tensor, behaviour_log_probs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Sums and a maximum that accumulate over micro-batches: add the sums, take the larger maximum.

    The KL is Schulman's k3 ("Approximating KL divergence", joschu.net/blog/kl-approx.html), an unbiased
    and never negative estimate of KL(behaviour || learner) from the behaviour policy's own samples:
    `r - 1 - log r` with `log r = learner - behaviour`. It is a small difference of large numbers, so
    everything is in float64.

    Args:
        learner_log_probs: `[batch, seq]`, nats, by the weights that sampled the tokens for a pure
            measure of the engines' numerical difference.
        behaviour_log_probs: `[batch, seq]`, nats; tokens where it is not finite are left out.
        mask: `[batch, seq]`, bool or 0/1.

    Returns:
        Scalars: `kl_sum` (nats), `abs_diff_sum` and `abs_diff_max` (nats, float64; 0 without tokens) and
        `num_tokens` (int64), by which the caller divides the sums.
    """
    mask = mask.bool() & behaviour_log_probs.isfinite()
    log_ratio = (learner_log_probs.double() - behaviour_log_probs.double()).masked_fill(~mask, 0.0)
    abs_diff = log_ratio.abs()
    return {
        "kl_sum": (torch.expm1(log_ratio) - log_ratio).sum(),
        "abs_diff_sum": abs_diff.sum(),
        "abs_diff_max": abs_diff.max(),
        "num_tokens": mask.sum(),
    }
