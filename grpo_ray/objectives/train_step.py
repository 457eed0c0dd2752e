"""From one micro-batch to its scalar loss: the Learner's function, and the handout's, which end in the same."""

from typing import Any

import torch
from torch import Tensor

from grpo_ray.config.losses import LossType, loss_record
from grpo_ray.objectives.aggregation import aggregate_loss, loss_denominator
from grpo_ray.objectives.inputs import Details, arguments_of
from grpo_ray.objectives.kl import kl_estimate, kl_sums
from grpo_ray.objectives.logprobs import check_shape
from grpo_ray.objectives.losses import LOSSES
from grpo_ray.objectives.objective import Objective, required


def policy_gradient_step(
    policy_log_probs: Tensor, response_mask: Tensor, *, objective: Objective, denominator: float | None = None,
    advantages: Tensor | None, old_log_probs: Tensor | None = None, weights: Tensor | None = None,
    reference_log_probs: Tensor | None = None, entropy: Tensor | None = None, row_tokens: Tensor | None = None,
    penalties: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Compute a micro-batch's share of the batch's loss; the caller runs the backward pass.

    Per token the loss is `weight * loss + kl_coefficient * KL - entropy_bonus * entropy`, aggregated under the
    mask. If one of them needs old logprobs, as the ratio losses do, tokens without a finite one are left out of
    the sum and the count of all three. Neither these nor those outside the mask get a gradient, whatever values
    the inputs hold there. A weight of 0 does not exclude a token: it stays in the count.

    Args:
        policy_log_probs: `[batch, seq]`, differentiated; tensors without a shape here have the same.
        response_mask: bool or 0/1, true where the token belongs to the response.
        denominator: the WHOLE batch's count (`loss_denominator`); for `token_mean`, of the tokens that
            are kept. None: these rows are the whole batch.
        advantages: `[batch, 1]` or `[batch, seq]`; for `no_baseline` the raw rewards.
        old_log_probs: for the ratio losses; others ignore it.
        weights: for the policy-gradient term only; never differentiated. An objective with corrections needs
            those of `objective.correction_weights`.
        reference_log_probs: nats; never differentiated.
        entropy: nats, differentiated; ignored without an entropy_bonus. The entropy of
            `get_response_log_probs` has no gradient; those of `compute_entropy` and `chunked_log_probs` have.
        row_tokens: `[batch]`, see `aggregate_loss`.
        penalties: coefficients of `|log(pi / pi_old)|`, which is added; needs old_log_probs.

    Returns:
        The scalar loss, and scalar tensors without gradient to sum over micro-batches: `num_tokens` (kept by
        mask and old logprobs); with reference_log_probs `kl_k1_sum` and `kl_k3_sum` over them (nats, float64);
        and for the ratio losses `num_ratios`, of the tokens with an advantage other than 0, `num_clipped` of
        them, and `num_clipped_low` of those, with a ratio below 1.

    Raises:
        ValueError: an argument that the objective needs is missing, a shape differs, or the entropy of an
            entropy_bonus has no gradient; see also `Objective.policy_gradient_loss`, `kl_estimate` and
            `aggregate_loss`.
    """
    of_tokens = {
        "response_mask": response_mask, "old_log_probs": old_log_probs, "weights": weights,
        "reference_log_probs": reference_log_probs, "entropy": entropy, "penalties": penalties,
    }  # fmt: skip
    for name, tensor in of_tokens.items():
        if tensor is not None:
            check_shape(name, tensor, policy_log_probs)
    if objective.corrections and weights is None:
        raise ValueError(
            f"the corrections {', '.join(objective.corrections)} act through weights, but weights is None; "
            "give objective.correction_weights(CorrectionInputs.of(first, behaviour, mask, advantages))[0]"
        )
    if objective.selection != "none" and weights is None and penalties is None:
        raise ValueError(
            f"the selection {objective.selection} acts through weights and penalties, but both are None; give "
            f"what SELECTIONS[{objective.selection!r}] returns for the whole batch"
        )
    mask = response_mask.bool()
    if objective.needs_old_log_probs and old_log_probs is not None:
        mask = mask & old_log_probs.isfinite()
        old_log_probs = old_log_probs.masked_fill(~mask, 0.0)
    # Filled before the loss as well: in the backward pass of exp even a zero gradient times NaN would be NaN.
    policy_log_probs = policy_log_probs.masked_fill(~mask, 0.0)
    per_token_loss, details = objective.policy_gradient_loss(policy_log_probs, mask, advantages, old_log_probs)
    if weights is not None:
        per_token_loss = per_token_loss * weights.detach().masked_fill(~mask, 0.0)
    if penalties is not None:
        if old_log_probs is None:
            raise ValueError("penalties need old_log_probs, from which the drift is measured")
        known = old_log_probs.isfinite()  # a loss without a ratio keeps the others, which have not drifted
        drift = (policy_log_probs - torch.where(known, old_log_probs, policy_log_probs).detach()).abs()
        per_token_loss = per_token_loss + penalties.detach().masked_fill(~mask, 0.0) * drift
    sums = {"num_tokens": mask.sum()}
    if "clipped" in details and "ratio" in details and advantages is not None:
        has_gradient = mask & (advantages != 0)  # whatever other groups the added terms bring along
        is_clipped = details["clipped"] & has_gradient
        sums |= {"num_ratios": has_gradient.sum(), "num_clipped": is_clipped.sum()}
        sums["num_clipped_low"] = (is_clipped & (details["ratio"] < 1)).sum()
    if reference_log_probs is not None:
        reference_log_probs = reference_log_probs.masked_fill(~mask, 0.0)
        sums |= kl_sums(policy_log_probs, reference_log_probs, mask)
    if objective.kl_coefficient:
        if reference_log_probs is None:
            raise ValueError(f"kl_coefficient {objective.kl_coefficient} needs reference_log_probs")
        kl = kl_estimate(policy_log_probs, reference_log_probs, objective.kl_estimator, old_log_probs)
        per_token_loss = per_token_loss + objective.kl_coefficient * kl
    if objective.entropy_bonus:
        if entropy is None:
            raise ValueError(f"entropy_bonus {objective.entropy_bonus} needs entropy")
        if policy_log_probs.requires_grad and not entropy.requires_grad:
            raise ValueError(
                f"entropy_bonus {objective.entropy_bonus} needs an entropy with a gradient, but this one has "
                "none; use compute_entropy(logits) outside of torch.no_grad()"
            )
        per_token_loss = per_token_loss - objective.entropy_bonus * entropy
    aggregation = objective.aggregation
    if denominator is None:
        if row_tokens is not None:
            raise ValueError("row_tokens needs denominator: rows do not say how many units they belong to")
        rows, num_tokens = len(mask), int(mask.sum())
        denominator = max(loss_denominator(aggregation, rows, num_tokens, None, rows), 1.0)
    return aggregate_loss(per_token_loss, mask, aggregation, denominator, row_tokens), sums


# ---- the functions of Stanford CS336's handout of spring 2025 ----


def compute_grpo_clip_loss(
    advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor, cliprange: float,
    cliprange_high: float | None = None, dual_clip: float | None = None,
) -> tuple[Tensor, Details]:  # fmt: skip
    """Compute GRPO-Clip by `compute_policy_gradient_loss`; `grpo_clip` has the formula.

    Args:
        advantages: `[batch, 1]` or `[batch, seq]`.
        policy_log_probs: `[batch, seq]`, differentiated.
        old_log_probs: `[batch, seq]`, never differentiated.
        cliprange, cliprange_high, dual_clip: see `grpo_clip`.

    Returns:
        The loss `[batch, seq]` and its details (see losses.py).

    Raises:
        ValueError: a shape differs, an epsilon is not above 0, or dual_clip not above 1.
    """
    return compute_policy_gradient_loss(
        policy_log_probs, "grpo_clip", None, advantages, old_log_probs, cliprange,
        cliprange_high=cliprange_high, dual_clip=dual_clip,
    )  # fmt: skip


def compute_policy_gradient_loss(
    policy_log_probs: Tensor, loss_type: LossType, raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None, old_log_probs: Tensor | None = None, cliprange: float | None = None,
    response_mask: Tensor | None = None, cliprange_high: float | None = None, dual_clip: float | None = None,
    **loss_options: Any,
) -> tuple[Tensor, Details]:  # fmt: skip
    """Compute the per-token loss named by `loss_type` from the arguments that it needs, ignoring the others.

    `no_baseline` needs raw_rewards, every other loss advantages. The ratio losses also need old_log_probs, and
    those with a ratio per response response_mask.

    Args:
        policy_log_probs: `[batch, seq]`.
        loss_type: one of `LossType`.
        raw_rewards, advantages: `[batch, 1]` or `[batch, seq]`.
        old_log_probs, response_mask: `[batch, seq]`.
        cliprange: low, and also high unless `cliprange_high` is given; None: the loss's own, as in a
            configuration (0.2 for most).
        dual_clip: see `grpo_clip`.
        loss_options: further keyword arguments of the loss, such as `delta` of `dppo_tv`; taken as they are.

    Returns:
        The loss `[batch, seq]` and its details (see losses.py; empty except for the ratio losses).

    Raises:
        ValueError: an argument that the loss needs is missing, a shape differs, the loss or an option of it is
            unknown, or a clip range is out of bounds.
    """
    objective = _of_name(loss_type, (cliprange, cliprange_high, dual_clip), loss_options)
    if loss_record(loss_type).is_of_responses:
        required("response_mask", response_mask, loss_type)
    if response_mask is None:
        response_mask = torch.ones_like(policy_log_probs, dtype=torch.bool)
    weights = raw_rewards if loss_type == "no_baseline" else advantages
    return objective.policy_gradient_loss(policy_log_probs, response_mask, weights, old_log_probs)


def grpo_microbatch_train_step(
    policy_log_probs: Tensor, response_mask: Tensor, gradient_accumulation_steps: int, loss_type: LossType,
    raw_rewards: Tensor | None = None, advantages: Tensor | None = None, old_log_probs: Tensor | None = None,
    cliprange: float | None = None, cliprange_high: float | None = None, dual_clip: float | None = None,
    **loss_options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Compute and backpropagate the loss of one of `gradient_accumulation_steps` micro-batches of equal size.

    The loss is each response's masked mean, averaged over the micro-batch and divided by the number of
    micro-batches. It is `policy_gradient_step` with `sequence_mean`; the arguments are those of
    `compute_policy_gradient_loss`.

    Returns:
        The scalar loss, detached (its graph is spent), and the sums of `policy_gradient_step`.

    Raises:
        ValueError: `gradient_accumulation_steps` is below 1; see also `policy_gradient_step`.
    """
    if gradient_accumulation_steps < 1:
        raise ValueError(f"gradient_accumulation_steps must be at least 1, got {gradient_accumulation_steps}")
    loss, sums = policy_gradient_step(
        policy_log_probs,
        response_mask,
        objective=_of_name(loss_type, (cliprange, cliprange_high, dual_clip), loss_options),
        denominator=policy_log_probs.shape[0] * gradient_accumulation_steps,
        advantages=raw_rewards if loss_type == "no_baseline" else advantages,
        old_log_probs=old_log_probs,
    )
    torch.autograd.backward(loss)
    return loss.detach(), sums


def _of_name(loss_type: LossType, bounds: tuple[float | None, ...], loss_options: dict[str, Any]) -> Objective:
    """Return the objective of the loss with those of the bounds that it has."""
    given = dict(zip(("cliprange", "cliprange_high", "dual_clip"), bounds, strict=True))
    own = arguments_of(LOSSES[loss_type], given) if loss_type in LOSSES else given
    return Objective(loss_type, "sequence_mean", **own, loss_options=loss_options)
