"""Per-token policy-gradient losses: `[batch, seq]` log-probabilities in, `[batch, seq]` losses out.

Every loss is the negative of the objective to be maximised, without masking (see aggregation.py).
All log-probabilities are natural logs.

The ratio losses compare with old log-probabilities, `ratio = pi / pi_old`. They clamp the log ratio to
[-20, 20] before exp, so that no token can overflow; beyond that the ratio has no gradient. Each returns its
loss and details without gradient: `clipped` (`[batch, seq]` bool), `clip_fraction` (scalar, the mean of
`clipped` over all tokens, padding included) and `ratio` (`[batch, seq]`). Advantages are a `[batch, 1]` column,
or one per token if turns have their own; `Objective.policy_gradient_loss`, their caller, refuses other shapes.
"""

import torch
from torch import Tensor

from grpo_ray.config.losses import LossType
from grpo_ray.objectives.inputs import Details, LossFn, LossInputs, RatioInputs, named, row_mean
from grpo_ray.objectives.logprobs import check_rows, clamped_exp
from grpo_ray.objectives.trust_regions import details, dppo_kl, dppo_tv, gmpo, ipo, sapo, token_form, vespo


def compute_naive_policy_gradient_loss(raw_rewards_or_advantages: Tensor, policy_log_probs: Tensor) -> Tensor:
    """Compute REINFORCE: `-A * log pi` at every token.

    (Williams 1992; in DeepSeekMath's unified analysis, arXiv:2402.03300, Appendix A.1, the gradient coefficient
    is then the reward or the advantage.)

    Args:
        raw_rewards_or_advantages: `[batch, 1]`, one scalar per response; or `[batch, seq]`.
        policy_log_probs: `[batch, seq]`, like the result.

    Raises:
        ValueError: the rewards are neither a `[batch, 1]` column nor `[batch, seq]`.
    """
    check_rows("raw_rewards_or_advantages", raw_rewards_or_advantages, policy_log_probs)
    return -raw_rewards_or_advantages * policy_log_probs


# ---- the losses by name, in the form that a loss of the user's own has too ----


def reinforce(inputs: LossInputs) -> tuple[Tensor, Details]:
    """Compute REINFORCE; see `compute_naive_policy_gradient_loss`."""
    return compute_naive_policy_gradient_loss(inputs.advantages, inputs.policy_log_probs), {}


def unclipped(inputs: RatioInputs) -> tuple[Tensor, Details]:
    """Compute the importance-weighted policy gradient: `-ratio * A` (PPO arXiv:1707.06347, Eq. 6).

    `clipped` is false everywhere.
    """
    ratio = clamped_exp(inputs.log_ratio)
    return -ratio * inputs.advantages, details(torch.zeros_like(inputs.mask), ratio)


def grpo_clip(
    inputs: RatioInputs, *, cliprange: float, cliprange_high: float | None = None,
    dual_clip: float | None = None,
) -> tuple[Tensor, Details]:  # fmt: skip
    """Compute GRPO-Clip: `-min(ratio * A, clip(ratio, 1 - low, 1 + high) * A)`.

    This is PPO's clipped surrogate (arXiv:1707.06347, Eq. 7) with group advantages: GRPO's objective
    (arXiv:2402.03300, Eq. 3) at one token, without its KL term. A separate upper bound is DAPO's clip-higher
    (arXiv:2503.14476, Section 3.1, Eq. 10). The dual clip (Ye et al. arXiv:1912.09729) bounds the objective
    from below by `dual_clip * A` where A < 0; in PPO it is unbounded there as the ratio grows.

    `clipped` is true where a bound takes effect, so that the token has no gradient.

    Args:
        cliprange: low, and also high unless `cliprange_high` is given.
        dual_clip: above 1; None disables it.

    Raises:
        ValueError: dual_clip is not above 1.
    """
    if dual_clip is not None and not dual_clip > 1.0:
        raise ValueError(f"dual_clip must be above 1, got {dual_clip}")
    ratio, advantages = clamped_exp(inputs.log_ratio), inputs.advantages
    objective, is_clipped = _clipped_surrogate(ratio, advantages, cliprange, cliprange_high)
    if dual_clip is not None:
        is_floored = (advantages < 0) & (objective < dual_clip * advantages)
        objective = torch.where(is_floored, dual_clip * advantages, objective)
        is_clipped = is_clipped | is_floored
    return -objective, details(is_clipped, ratio)


def gspo(
    inputs: RatioInputs, *, cliprange: float, cliprange_high: float | None = None
) -> tuple[Tensor, Details]:
    """Compute GSPO: GRPO-Clip with one ratio per response, `exp(mean over its tokens of log(pi / pi_old))`.

    Group Sequence Policy Optimization (arXiv:2507.18071, Eq. 5-7): the ratio of the whole response's
    likelihoods to the power 1 / length. It is in the token form of Section 4.3 (GSPO-token): each token has its
    response's value and its own gradient, so factors and advantages may differ along the response. With one
    advantage, `sequence_mean` gives the paper's objective and gradient. Each row has a ratio of its own, also
    where the branches of one episode are several rows: a branch is sampled in a context of its own. A row
    without tokens has ratio 1.

    With one advantage, loss and details are constant along each row. `clipped` is true at tokens without a
    gradient, which then are those of the whole response.

    Args:
        cliprange: low, and also high unless `cliprange_high` is given; the paper uses 3e-4 and 4e-4.
    """
    mean = row_mean(inputs.log_ratio.detach(), inputs.mask)  # [batch, 1]
    ratio = token_form(mean, inputs.policy_log_probs)
    objective, is_clipped = _clipped_surrogate(ratio, inputs.advantages, cliprange, cliprange_high)
    return -objective, details(is_clipped, ratio)


def cispo(
    inputs: RatioInputs, *, cliprange: float, cliprange_high: float | None = None
) -> tuple[Tensor, Details]:
    """Compute CISPO: `-stopgrad(clip(ratio, 1 - low, 1 + high)) * A * log pi`.

    MiniMax-M1 (arXiv:2506.13585, Eq. 4-5): REINFORCE with a clipped importance weight. The clip bounds a
    token's weight, and every token keeps its gradient; `clipped` is true where it changed the weight.

    Args:
        cliprange: low, and also high unless `cliprange_high` is given; from 1 on there is no lower bound.
    """
    ratio = clamped_exp(inputs.log_ratio.detach())
    weight = _clip(ratio, cliprange, cliprange_high)
    return -weight * inputs.advantages * inputs.policy_log_probs, details(weight != ratio, ratio)


# LUSPO (arXiv:2602.05261) is GSPO with a sum over each response in place of its mean: `sequence_sum`.
LOSSES: dict[LossType, LossFn] = {
    "no_baseline": reinforce,
    "reinforce_with_baseline": reinforce,
    "unclipped": unclipped,
    "grpo_clip": grpo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "luspo": gspo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "ipo": ipo,
    "sapo": sapo,
    "gmpo": gmpo,
    "vespo": vespo,
}


def loss_function(name: str) -> LossFn:
    """Return the loss with this name, or import `module:function`."""
    return named(name, LOSSES, "algorithm.loss")


def _clip(ratio: Tensor, cliprange: float, cliprange_high: float | None) -> Tensor:
    return ratio.clamp(1.0 - cliprange, 1.0 + (cliprange if cliprange_high is None else cliprange_high))


def _clipped_surrogate(
    ratio: Tensor, advantages: Tensor, cliprange: float, cliprange_high: float | None
) -> tuple[Tensor, Tensor]:
    """Return the objective, and where the clipped branch is strictly the smaller."""
    unclipped, clipped = ratio * advantages, _clip(ratio, cliprange, cliprange_high) * advantages
    return torch.minimum(unclipped, clipped), clipped < unclipped
