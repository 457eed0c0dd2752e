"""How far the policy is from a reference, estimated from the policy's own tokens."""

from typing import Literal, get_args

import torch
from torch import Tensor

from grpo_ray.algorithms.ratios import MAX_LOG_RATIO

KLEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(policy_log_probs: Tensor, reference_log_probs: Tensor, estimator: KLEstimator) -> Tensor:
    """Schulman's estimates of KL(policy || reference) at tokens that the policy sampled, in nats.

    ("Approximating KL divergence", joschu.net/blog/kl-approx.html.) With `d = log reference - log policy`:

    - `k1 = -d`: unbiased, of either sign, of large variance.
    - `k2 = d^2 / 2`: biased, never negative; close to the KL while the two are close.
    - `k3 = exp(d) - d - 1`: unbiased and never negative. GRPO's (arXiv:2402.03300, Eq. 4).

    As a term of the loss what counts is the gradient, over samples that are held fixed. In expectation over
    the policy it is, for k1, `E[grad log policy] = 0`: no pull at all, only noise. For k2 it is
    `E[-d * grad log policy]`, the gradient of KL(policy || reference) itself. For k3 it is
    `E[(1 - exp(d)) * grad log policy]`, the gradient of the other direction, KL(reference || policy), which
    agrees with k2's to first order in d.

    `d` is clamped to at most 20 in k3, as a whole, where exp would overflow: the value stays at exp(20) - 21
    and the gradient is 0. (In the exp alone, the rest would push the policy away from the reference.)

    Args:
        policy_log_probs: `[batch, seq]`, differentiated.
        reference_log_probs: `[batch, seq]`, never differentiated.
        estimator: one of `KLEstimator`.

    Returns:
        `[batch, seq]`, nats.

    Raises:
        ValueError: the estimator is unknown, or the shapes differ.
    """
    if reference_log_probs.shape != policy_log_probs.shape:
        raise ValueError(
            f"reference_log_probs has shape {tuple(reference_log_probs.shape)}, "
            f"policy_log_probs {tuple(policy_log_probs.shape)}; they must be the same"
        )
    log_ratio = reference_log_probs.detach() - policy_log_probs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    if estimator == "k3":
        log_ratio = log_ratio.clamp(max=MAX_LOG_RATIO)
        return torch.expm1(log_ratio) - log_ratio
    raise ValueError(f"unknown KL estimator {estimator!r}; allowed: {', '.join(get_args(KLEstimator))}")
