"""Losses that bound an update by something other than a clipped ratio of single tokens.

Each takes `RatioInputs`, and returns the loss `[batch, seq]` and the details `clipped`, `clip_fraction` and
`ratio` (see losses.py). The log ratio is clamped to [-20, 20] before exp.
"""

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from grpo_ray.objectives.inputs import Details, RatioInputs, row_mean, row_sum
from grpo_ray.objectives.logprobs import MAX_LOG_RATIO, clamped_exp


def dppo_tv(
    inputs: RatioInputs, *, delta: PositiveFloat = 0.15, delta_high: PositiveFloat | None = None,
    cap: PositiveFloat = 20.0, kl_tau: NonNegativeFloat = 0.0,
) -> tuple[Tensor, Details]:  # fmt: skip
    """Compute DPPO with the binary total variation `|pi - pi_old|` as its divergence.

    Divergence PPO (Qi et al. arXiv:2602.04879): a token has no gradient where the update would lead further out
    of the trust region, that is with `pi - pi_old > delta_high` where A > 0, and with `pi_old - pi > delta`
    elsewhere. Every other token has REINFORCE's gradient times its ratio: `-stopgrad(min(ratio, cap)) * A * log
    pi`. A ratio bound cuts rare tokens off early and lets frequent ones move far; a bound on probabilities does
    the reverse. `kl_tau` adds the pull back to pi_old of Kimi K2.5 (arXiv:2602.02276), `kl_tau * log(pi /
    pi_old)^2`, at every token, also outside the trust region.

    Args:
        delta: the largest decrease of a token's probability, and increase unless `delta_high` is given.
        delta_high: the largest increase.
        cap: the largest weight.
        kl_tau: weight of the squared log ratio, at least 0.
    """
    difference = _probability(inputs.policy_log_probs) - _probability(inputs.old_log_probs)
    is_outside = _leads_out(inputs, difference, delta, delta_high)
    return _within(inputs, is_outside, cap, kl_tau)


def dppo_kl(
    inputs: RatioInputs, *, delta: PositiveFloat = 0.05, delta_high: PositiveFloat | None = None,
    cap: PositiveFloat = 20.0, kl_tau: NonNegativeFloat = 0.0,
) -> tuple[Tensor, Details]:  # fmt: skip
    """Compute DPPO with the binary KL divergence, that of "this token or another" under old and new policy.

    As `dppo_tv`, with `KL = p log(p / q) + (1 - p) log((1 - p) / (1 - q))` for `p = pi_old` and `q = pi`, which
    weighs changes near 0 and 1 more. `delta` and `delta_high` are in nats.
    """
    new, old = _probability(inputs.policy_log_probs), _probability(inputs.old_log_probs)
    others_old, others_new = ((1 - p).clamp(min=1e-6) for p in (old, new))
    divergence = old * (old.clamp(min=1e-9).log() - new.clamp(min=1e-9).log())
    divergence = divergence + (1 - old) * (others_old.log() - others_new.log())
    signed = torch.where(new > old, divergence, -divergence)
    return _within(inputs, _leads_out(inputs, signed, delta, delta_high), cap, kl_tau)


def ipo(
    inputs: RatioInputs, *, delta: PositiveFloat = 0.3, cap: PositiveFloat = 20.0,
    kl_tau: NonNegativeFloat = 0.0,
) -> tuple[Tensor, Details]:  # fmt: skip
    """Compute IPO: as `dppo_tv`, without any token with `|pi - pi_old| > delta`, whatever its advantage.

    (Prime Intellect, prime-rl's default loss since August 2026; its documentation, "IPO". A token that the
    sampler and the Learner disagree about is left out also where the update would bring them together.)

    Args:
        delta: the largest change of a token's probability; prime-rl's `eps`.
        cap: the largest weight; prime-rl has none.
    """
    difference = _probability(inputs.policy_log_probs) - _probability(inputs.old_log_probs)
    return _within(inputs, difference.abs() > delta, cap, kl_tau)


def sapo(
    inputs: RatioInputs, *, tau: PositiveFloat = 1.0, tau_negative: PositiveFloat = 1.05
) -> tuple[Tensor, Details]:
    """Compute SAPO: `-4 / t * sigmoid(t * (ratio - 1)) * A`, with `t = tau` where A > 0, else `tau_negative`.

    Soft Adaptive Policy Optimization (arXiv:2511.20347): in place of a clip a gate with slope 1 at ratio 1
    and fades on both sides. `clipped` is false everywhere.

    Args:
        tau: the larger, the narrower the gate.
        tau_negative: the same where the advantage is not positive; slightly larger in the paper, since pushing
            a token down spreads its probability over all others.
    """
    ratio = clamped_exp(inputs.log_ratio)
    positive, negative = (ratio.new_full(inputs.advantages.shape, t) for t in (tau, tau_negative))
    temperature = torch.where(inputs.advantages > 0, positive, negative)
    gate = torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature
    return -gate * inputs.advantages, details(torch.zeros_like(inputs.mask), ratio)


def gmpo(
    inputs: RatioInputs, *, cliprange: float, cliprange_high: float | None = None
) -> tuple[Tensor, Details]:
    """Compute GMPO: `-(geometric mean over the response of its clipped ratios) * A`.

    Geometric-Mean Policy Optimization (arXiv:2507.20673): each log ratio is bounded by `cliprange_high`
    where A > 0 and by `-cliprange` elsewhere, then averaged. As in `gspo`, each token has its response's value
    and its own gradient, which is 0 where it is bounded; with one advantage, `sequence_mean` gives the paper's
    objective and gradient. The branches of an episode are rows with a mean of their own, and turns with
    different advantages are bounded by their own signs.

    Args:
        cliprange: bound on the log ratio below, and above unless `cliprange_high` is given; 0.4 in the paper.
    """
    high = cliprange if cliprange_high is None else cliprange_high
    log_ratio = inputs.log_ratio
    is_up = inputs.advantages > 0
    bounded = torch.where(is_up, log_ratio.clamp(max=high), log_ratio.clamp(min=-cliprange))
    mean = row_mean(bounded.detach(), inputs.mask)  # [batch, 1]
    loss = -token_form(mean, bounded) * inputs.advantages
    return loss, details(bounded != log_ratio, clamped_exp(log_ratio))


def vespo(
    inputs: RatioInputs, *, k: NonNegativeFloat = 2.0, decay: PositiveFloat = 3.0,
    k_negative: NonNegativeFloat = 3.0, decay_negative: PositiveFloat = 2.0,
) -> tuple[Tensor, Details]:  # fmt: skip
    """Compute VESPO: `-stopgrad(W^k * exp(decay * (1 - W))) * A * log pi` with the response's ratio W.

    Variational Sequence-level Soft Policy Optimization (Shen et al. arXiv:2602.10693): W is the product of the
    ratios of the response's tokens, and its weight, 1 at W = 1, has its maximum at `W = k / decay` and fades on
    both sides. `clipped` is false everywhere. Each branch of an episode has its own W, as in `gspo`.

    Args:
        k, k_negative: exponents where the advantage is not negative, and where it is.
        decay, decay_negative: the paper's lambda, in the same way.
    """
    log_ratio = row_sum(inputs.log_ratio.detach(), inputs.mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio, is_negative = log_ratio.exp(), inputs.advantages < 0  # ratio: [batch, 1]
    pairs = (k, decay), (k_negative, decay_negative)
    weight, weight_negative = ((power * log_ratio + rate * (1 - ratio)).exp() for power, rate in pairs)
    loss = -torch.where(is_negative, weight_negative, weight) * inputs.advantages * inputs.policy_log_probs
    return loss, details(torch.zeros_like(inputs.mask), ratio.expand_as(inputs.mask))


def token_form(log_ratio: Tensor, log_values: Tensor) -> Tensor:
    """Return the response's ratio at each token, with the gradient of the token's own `log_values` alone.

    (GSPO-token, arXiv:2507.18071, Section 4.3, Eq. 14.) The gradient of the mean over a response is that of its
    geometric mean, while a factor that differs along the response reaches the tokens that it belongs to.

    Args:
        log_ratio: `[batch, 1]`, without gradient; beyond [-20, 20] the result has none either.
        log_values: `[batch, seq]`; -inf has no gradient.
    """
    own = log_values.clamp(min=torch.finfo(log_values.dtype).min)  # -inf minus itself would be NaN
    own = (own - own.detach()).masked_fill(log_ratio.abs() > MAX_LOG_RATIO, 0.0)
    return clamped_exp(log_ratio) * own.exp()


def details(is_clipped: Tensor, ratio: Tensor) -> Details:
    """Return the details of a ratio loss; see losses.py."""
    return {"clipped": is_clipped, "clip_fraction": is_clipped.float().mean(), "ratio": ratio.detach()}


def _probability(log_probs: Tensor) -> Tensor:
    return log_probs.detach().clamp(max=0.0).exp()  # rounding can leave log-probabilities above 0


def _leads_out(inputs: RatioInputs, change: Tensor, low: float, high: float | None) -> Tensor:
    """Return `[batch, seq]`, true where the change is outside [-low, high] on the advantage's side."""
    return torch.where(inputs.advantages > 0, change > (low if high is None else high), change < -low)


def _within(inputs: RatioInputs, is_outside: Tensor, cap: float, kl_tau: float) -> tuple[Tensor, Details]:
    """Return REINFORCE weighted by the ratio, without the tokens outside, and the squared log ratio of all."""
    ratio = clamped_exp(inputs.log_ratio.detach())
    weight = ratio.clamp(max=cap).masked_fill(is_outside, 0.0)
    loss = -weight * inputs.advantages * inputs.policy_log_probs
    if kl_tau:
        loss = loss + kl_tau * inputs.log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).square()
    return loss, details(is_outside, ratio)
