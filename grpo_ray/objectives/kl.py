"""Distances between two distributions, estimated from their log-probabilities of sampled tokens."""

from typing import get_args

import torch
from torch import Tensor

from grpo_ray.config.algorithm import KLEstimator
from grpo_ray.objectives.logprobs import MAX_LOG_RATIO, check_shape, clamped_exp


def kl_estimate(
    policy_log_probs: Tensor, reference_log_probs: Tensor, estimator: KLEstimator,
    old_log_probs: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Estimate KL(policy || reference) at tokens that the policy sampled, in nats, by Schulman's estimators.

    ("Approximating KL divergence", joschu.net/blog/kl-approx.html.) With `d = log reference - log policy`:

    - `k1 = -d`: unbiased, of either sign, with large variance.
    - `k2 = d^2 / 2`: biased, never negative; close to the KL while the two are close.
    - `k3 = exp(d) - d - 1`: unbiased and never negative. Used by GRPO (arXiv:2402.03300, Eq. 4).

    For a term of the loss, what matters is the gradient, with the samples held fixed. In expectation over the
    policy it is, for k1, `E[grad log policy] = 0`: no pull at all, only noise. For k2 it is
    `E[-d * grad log policy]`, the gradient of KL(policy || reference) itself. For k3 it is
    `E[(1 - exp(d)) * grad log policy]`, the gradient of the reverse divergence, KL(reference || policy), which
    agrees with that of k2 to first order in d.

    Three estimators are made for their gradient. `k1+` and `k3+` have the value of k1 and k3, and the gradient
    of k2 (straight through). All of these take the tokens to be the policy's own; those of an older policy
    pi_old need its ratio: `unbiased = pi / pi_old * k3`, with the ratio differentiated (DeepSeek-V3.2
    arXiv:2512.02556, Section 3.1), has in expectation over pi_old the value and the gradient of KL(policy ||
    reference).

    In k3 `d` is clamped to at most 20, where exp would overflow, in both terms: the value stays at exp(20) - 21
    and the gradient is 0. (Clamping inside the exp only, the other term would push the policy away from the
    reference.)

    Args:
        policy_log_probs: `[batch, seq]`, differentiated.
        reference_log_probs: `[batch, seq]`, never differentiated.
        old_log_probs: `[batch, seq]`, of the policy that sampled; for `unbiased` alone, never differentiated.

    Returns:
        `[batch, seq]`, nats.

    Raises:
        ValueError: the estimator is unknown, or the shapes differ, or `unbiased` has no old logprobs.
    """
    check_shape("reference_log_probs", reference_log_probs, policy_log_probs)
    if estimator not in get_args(KLEstimator):
        raise ValueError(f"unknown KL estimator {estimator!r}; allowed: {', '.join(get_args(KLEstimator))}")
    log_ratio = reference_log_probs.detach() - policy_log_probs
    k2 = log_ratio.square() / 2
    if estimator in ("k1", "k1+"):
        estimate = -log_ratio
    elif estimator == "k2":
        estimate = k2
    else:
        capped = log_ratio.clamp(max=MAX_LOG_RATIO)
        estimate = torch.expm1(capped) - capped
    if estimator in ("k1+", "k3+"):
        return estimate.detach() + (k2 - k2.detach())
    if estimator == "unbiased":
        if old_log_probs is None:
            raise ValueError("the KL estimator `unbiased` needs old_log_probs")
        check_shape("old_log_probs", old_log_probs, policy_log_probs)
        return clamped_exp(policy_log_probs - old_log_probs.detach()) * estimate
    return estimate


@torch.no_grad()
def teacher_term(teacher_log_probs: Tensor, policy_log_probs: Tensor, max_gap: float) -> Tensor:
    """Return `log(teacher / policy)` at tokens of the policy's responses, bounded to [-max_gap, max_gap].

    As a term of the advantage it estimates the gradient of the negative reverse KL, -KL(policy || teacher), at
    the sampled token: on-policy distillation (GKD, arXiv:2306.13649, with the student's samples and reverse KL)
    as a policy gradient with discount 0 (Lu and Thinking Machines Lab, "On-Policy Distillation", 2025). The
    policy is the current one, whichever sampled the tokens. With the sampler in its place the objective would
    be -KL(policy || teacher) + KL(policy || sampler), which rewards distance from an old sampler.

    Args:
        teacher_log_probs: nats; -inf where the teacher rules the token out.
        policy_log_probs: of the same shape, nats, of the current policy.
        max_gap: nats, above 0.
    """
    return (teacher_log_probs - policy_log_probs).clamp(-max_gap, max_gap)


@torch.no_grad()
def kl_sums(policy_log_probs: Tensor, reference_log_probs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Sum the k1 and k3 estimates over the tokens of a micro-batch, to measure the distance to a reference.

    Args:
        policy_log_probs, reference_log_probs: `[batch, seq]`, nats.
        mask: `[batch, seq]`, bool or 0/1.

    Returns:
        Scalars `kl_k1_sum` and `kl_k3_sum` (nats, float64), to sum over micro-batches.
    """
    outside = ~mask.bool()
    policy = policy_log_probs.double().masked_fill(outside, 0.0)
    reference = reference_log_probs.double().masked_fill(outside, 0.0)
    return {
        "kl_k1_sum": kl_estimate(policy, reference, "k1").sum(),
        "kl_k3_sum": kl_estimate(policy, reference, "k3").sum(),
    }


@torch.no_grad()
def mismatch_sums(learner_log_probs: Tensor, behaviour_log_probs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Measure how far the sampler's log-probabilities are from the Learner's for the same tokens.

    The results accumulate over micro-batches: add the sums, take the larger maximum. The KL is Schulman's k3
    (see `kl_estimate`), here an unbiased and never negative estimate of KL(behaviour || learner) from the
    behaviour policy's own samples: `r - 1 - log r` with `log r = learner - behaviour`. It is a small difference
    of large numbers, so everything is in float64. The ratios r are also the weights of
    `effective_sample_fraction`.

    Args:
        learner_log_probs: `[batch, seq]`, nats. To measure the numerical difference of the engines alone, they
            must come from the weights that sampled the tokens.
        behaviour_log_probs: `[batch, seq]`, nats; tokens where it is not finite are excluded.
        mask: `[batch, seq]`, bool or 0/1.

    Returns:
        Scalars: `mismatch_kl` and `logprob_diff_max` (nats; 0 without tokens), `weight_sum` and
        `weight_square_sum` of the untruncated ratios, and `num_weights`, by which the caller divides the KL.
    """
    mask = mask.bool() & behaviour_log_probs.isfinite()
    log_ratio = (learner_log_probs.double() - behaviour_log_probs.double()).masked_fill(~mask, 0.0)
    abs_diff = log_ratio.abs()
    weights = clamped_exp(log_ratio).masked_fill(~mask, 0.0)
    return {
        "mismatch_kl": (torch.expm1(log_ratio) - log_ratio).sum(),
        "logprob_diff_max": abs_diff.amax() if abs_diff.numel() else abs_diff.sum(),
        "weight_sum": weights.sum(),
        "weight_square_sum": weights.square().sum(),
        "num_weights": mask.sum(),
    }


def effective_sample_fraction(weight_sum: float, weight_square_sum: float, num_weights: float) -> float:
    """Return Kish's effective sample size divided by the sample size, `(sum w)^2 / (n * sum w^2)` (Kish 1965).

    It is from 1 / n to 1, and 1 if all weights are equal; n is at least 1.
    """
    return float(weight_sum) ** 2 / (float(num_weights) * float(weight_square_sum))
