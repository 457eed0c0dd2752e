"""From rewards to advantages: shaping of the rewards, then comparison within each group."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Annotated, Any, get_args

import torch
from annotated_types import Ge
from torch import Tensor

from grpo_ray.config.algorithm import AdvantageKind, Std
from grpo_ray.objectives.inputs import AdvantageFn, AdvantageInputs, arguments_of, named


def overlong_penalties(lengths: Tensor, max_tokens: int, buffer_tokens: int, penalty: float) -> Tensor:
    """Return the soft overlong punishment of each response, scaled by `penalty`.

    (DAPO arXiv:2503.14476, Section 3.4, Eq. 13.) It is 0 up to `max_tokens - buffer_tokens` tokens, falls
    linearly from there to `-penalty` at `max_tokens`, and stays at `-penalty` beyond. Add it to the rewards
    before computing advantages.

    Args:
        lengths: `[G]`, response lengths in tokens; the result is `[G]`, float32, none above 0.
        max_tokens: the maximum response length (the paper's L_max).
        buffer_tokens: the paper's L_cache; 0 turns the punishment off.
        penalty: at least 0, in units of reward (1 in the paper).

    Raises:
        ValueError: buffer_tokens is outside [0, max_tokens], or the penalty is negative.
    """
    if not 0 <= buffer_tokens <= max_tokens:
        raise ValueError(f"buffer_tokens must be between 0 and max_tokens ({max_tokens}), got {buffer_tokens}")
    if not penalty >= 0:
        raise ValueError(f"penalty must be at least 0, got {penalty}")
    lengths = lengths.float()  # exact up to 2^24 tokens
    if buffer_tokens == 0:
        return lengths.new_zeros(lengths.shape)
    return penalty * ((max_tokens - buffer_tokens - lengths) / buffer_tokens).clamp(-1.0, 0.0)


def mean_std(inputs: AdvantageInputs, *, eps: float = 1e-6, std: Std = "sample") -> Tensor:
    """Return `(r - mean) / (std + eps)`.

    (GRPO's outcome supervision, DeepSeekMath arXiv:2402.03300, Section 4.1.2.)
    """
    return _standardized(inputs.rewards, eps, std)


def mean(inputs: AdvantageInputs) -> Tensor:
    """Return `r - mean` (Dr. GRPO arXiv:2503.20783, Section 3.2)."""
    return _centred(inputs.rewards)


def leave_one_out(inputs: AdvantageInputs) -> Tensor:
    """Return `r` minus the mean of the other G - 1, which is `G / (G - 1) * (r - mean)`.

    (RLOO, Ahmadian et al. arXiv:2402.14740.)

    Raises:
        ValueError: the groups are of size 1.
    """
    group_size = inputs.rewards.shape[1]
    if group_size < 2:
        raise ValueError("leave_one_out compares with the rest of the group: G must be at least 2, got 1")
    return _centred(inputs.rewards) * (group_size / (group_size - 1))


def max_only(inputs: AdvantageInputs) -> Tensor:
    """Return `r` where it equals the group's maximum, else 0. Not centred.

    (The "max" deltas of Stanford CS336's lecture on policy gradients.)
    """
    rewards = inputs.rewards
    return rewards.masked_fill(rewards < rewards.amax(dim=1, keepdim=True), 0.0)


def raw(inputs: AdvantageInputs) -> Tensor:
    """Return `r`. Not centred."""
    return inputs.rewards.clone()


def max_rl(inputs: AdvantageInputs, *, eps: float = 1e-6) -> Tensor:
    """Return `(r - mean) / (mean + eps)`, and 0 in a group with a mean of at most 0.

    (MaxRL, Tajwar et al. arXiv:2602.02710: with rewards of 0 and 1 its expected gradient is that of the sum
    of pass@k / k over k < G, the first terms of the log probability of a success.) Meant for rewards >= 0.
    """
    means = inputs.rewards.mean(dim=1, keepdim=True)
    return (_centred(inputs.rewards) / (means + eps)).masked_fill(means <= 0, 0.0)


def pass_at_k(
    inputs: AdvantageInputs, *, k: Annotated[int, Ge(1)], threshold: float = 0.5, eps: float = 1e-6
) -> Tensor:
    """Return each response's mean advantage over all subsets of k of its group: their reward is their best.

    (Chen et al. arXiv:2508.10751, the analytical derivation in Section 2.) A subset's reward is 1 if a response
    in it succeeds. Subsets are compared by mean and population standard deviation, so k = 1 is
    `mean_std` with that one.

    Args:
        k: at most G; of a smaller group, as after failures of the grader, the whole is the only subset.
        threshold: a response succeeds if its reward is above it.
    """
    rewards = inputs.rewards
    size = rewards.shape[1]
    k, is_right = min(k, size), rewards > threshold
    num_wrong = (~is_right).sum(dim=1, keepdim=True)  # [groups, 1]
    share_failing = _choices(size, k, rewards)[num_wrong]
    # Of the subsets with a given wrong response; never looked up where there is none.
    share_with_wrong = _choices(size - 1, k - 1, rewards)[(num_wrong - 1).clamp(min=0)]
    deviation = (share_failing * (1 - share_failing)).sqrt()
    advantages = torch.where(is_right, share_failing, share_failing - share_with_wrong) / (deviation + eps)
    return torch.where(rewards.isnan(), rewards, advantages.masked_fill(deviation == 0, 0.0))


def _choices(size: int, chosen: int, like: Tensor) -> Tensor:
    """Return `C(n, chosen) / C(size, chosen)` for n from 0 to `size`, `[size + 1]`."""
    falling = accumulate(range(size, 0, -1), lambda share, n: share * (n - chosen) / n, initial=1.0)
    return like.new_tensor([max(0.0, share) for share in falling][::-1])


def gdpo(
    inputs: AdvantageInputs, *, reward_weight: float | None = None, format_weight: float | None = None,
    answer_weight: float | None = None, eps: float = 1e-6, std: Std = "sample",
) -> Tensor:  # fmt: skip
    """Return the weighted sum of `(r - mean) / (std + eps)` over a response's several rewards.

    (GDPO, Liu et al. arXiv:2601.05242: in one sum of rewards, a rare one would drown. Its second half, which
    whitens the sums over the batch, is `algorithm.advantage_scale: whiten_responses`.) The rewards are those of
    the terms of `task.reward`, each with its weight there and compared with those responses that it applies to.
    A reward of a single term, or any weight given here, makes them the reward (default weight 1), the format
    (1) and the answer (0).
    """
    if inputs.terms and reward_weight is format_weight is answer_weight is None:
        weighted = [
            inputs.weights[name] * _standardized_where_known(term, eps, std)
            for name, term in inputs.terms.items()
        ]
    else:
        parts = (
            (1.0 if reward_weight is None else reward_weight, inputs.rewards),
            (1.0 if format_weight is None else format_weight, inputs.format_rewards),
            (0.0 if answer_weight is None else answer_weight, inputs.answer_rewards),
        )
        weighted = [weight * _standardized(part, eps, std) for weight, part in parts]
    return torch.stack(weighted).sum(dim=0)


ADVANTAGES: dict[AdvantageKind, AdvantageFn] = {
    "mean_std": mean_std,
    "mean": mean,
    "leave_one_out": leave_one_out,
    "max_only": max_only,
    "raw": raw,
    "max_rl": max_rl,
    "pass_at_k": pass_at_k,
    "gdpo": gdpo,
}


def advantage_function(name: str) -> AdvantageFn:
    """Return the advantage with this name, or import `module:function`."""
    return named(name, ADVANTAGES, "algorithm.advantage")


def _centred(rewards: Tensor) -> Tensor:
    return _or_zero(rewards - rewards.mean(dim=1, keepdim=True), rewards)


def _standardized(rewards: Tensor, eps: float, std: Std) -> Tensor:
    centred = _centred(rewards)
    if rewards.shape[1] < 2:
        return centred
    deviation = rewards.std(dim=1, keepdim=True, correction=int(std == "sample"))
    return _or_zero(centred / (deviation + eps), rewards)


def _standardized_where_known(rewards: Tensor, eps: float, std: Std) -> Tensor:
    """Standardize each group's rewards that are not NaN among themselves; return 0 for the others."""
    known = ~rewards.isnan()
    if known.all():
        return _standardized(rewards, eps, std)
    found = torch.zeros_like(rewards)
    for row, is_known, result in zip(rewards, known, found, strict=True):
        if is_known.any():
            result[is_known] = _standardized(row[is_known][None], eps, std)[0]
    return found


def _or_zero(advantages: Tensor, rewards: Tensor) -> Tensor:
    """Return the advantages, exactly 0 for equal rewards.

    Rounding in the mean alone would leave 1e-8, which a division by the standard deviation would blow up.
    """
    return advantages.masked_fill(_has_equal_rewards(rewards)[:, None], 0.0)


def group_advantages(
    rewards: Tensor, kind: AdvantageKind = "mean_std", *, advantage_eps: float = 1e-6, std: Std = "sample",
    **options: Any,
) -> Tensor:  # fmt: skip
    """Compare each response's reward with the rewards of its group.

    Args:
        rewards: `[groups, G]`, floating point, one group per row.
        kind: one of `AdvantageKind`; each is a function in this file, with formula and source.
        advantage_eps: added to what is divided by, in units of reward.
        std: `sample` divides the squares by G - 1, `population` by G (`mean_std`, `gdpo`).
        options: further keyword arguments of the function.

    Returns:
        `[groups, G]`. All but `max_only` and `raw` give exactly 0 for a group of equal rewards, including a
        group of size 1. `gdpo` sees no parts of the rewards here.

    Raises:
        ValueError: rewards are not floats `[groups, G]`, a name is unknown, or G is 1 with `leave_one_out`.
    """
    if rewards.ndim != 2 or not rewards.is_floating_point():
        raise ValueError(f"rewards must be floats [groups, G], got {rewards.dtype} {tuple(rewards.shape)}")
    if kind not in ADVANTAGES:
        raise ValueError(f"unknown advantage kind {kind!r}; allowed: {', '.join(ADVANTAGES)}")
    if std not in get_args(Std):
        raise ValueError(f"unknown std {std!r}; allowed: {', '.join(get_args(Std))}")
    function, no_parts = ADVANTAGES[kind], torch.zeros_like(rewards)
    fields = arguments_of(function, {"eps": advantage_eps, "std": std})
    inputs = AdvantageInputs(rewards, no_parts, no_parts, torch.ones_like(rewards))
    return function(inputs, **fields, **options)


def compute_group_normalized_rewards(
    reward_fn: Callable[[str, str], dict[str, float]], rollout_responses: Sequence[str],
    repeated_ground_truths: Sequence[str], group_size: int, advantage_eps: float, normalize_by_std: bool,
) -> tuple[Tensor, Tensor, dict[str, float]]:  # fmt: skip
    """Score every response and convert the rewards to advantages, group by group.

    Args:
        reward_fn: maps `(response, ground_truth)` to a dict with `reward`, `format_reward`, `answer_reward`.
        rollout_responses: n responses; every `group_size` consecutive ones answer the same prompt.
        repeated_ground_truths: n ground truths, that of each prompt repeated `group_size` times.
        advantage_eps: see `group_advantages`.
        normalize_by_std: use `mean_std` of `group_advantages`, otherwise `mean`.

    Returns:
        Advantages `[n]`, raw rewards `[n]` (both float32), and metrics of the batch as floats.

    Raises:
        ValueError: the lists differ in length or do not fill groups, or a reward is not such a dict.
    """
    num_responses = len(rollout_responses)
    if num_responses != len(repeated_ground_truths):
        found = f"{num_responses} rollout_responses but {len(repeated_ground_truths)} repeated_ground_truths"
        raise ValueError(f"{found}; repeat each ground truth group_size times")
    if group_size < 1 or num_responses < 1 or num_responses % group_size:
        raise ValueError(f"{num_responses} rollout_responses do not fill groups of group_size {group_size}")
    scores = [reward_fn(*pair) for pair in zip(rollout_responses, repeated_ground_truths, strict=True)]
    raw_rewards = _column(scores, "reward")
    groups = raw_rewards.view(-1, group_size)
    kind: AdvantageKind = "mean_std" if normalize_by_std else "mean"
    advantages = group_advantages(groups, kind, advantage_eps=advantage_eps).flatten()
    metadata = {
        "reward/mean": raw_rewards.mean().item(),
        "reward/std": raw_rewards.std().item() if num_responses > 1 else 0.0,
        "reward/min": raw_rewards.min().item(),
        "reward/max": raw_rewards.max().item(),
        "reward/format": _column(scores, "format_reward").mean().item(),
        "reward/answer": _column(scores, "answer_reward").mean().item(),
        "rollout/zero_variance_groups": float(_has_equal_rewards(groups).sum().item()),
    }
    return advantages, raw_rewards, metadata


def _has_equal_rewards(rewards: Tensor) -> Tensor:
    """Return `[groups]` bool: true where all rewards `[groups, G]` of the group are the same."""
    return (rewards == rewards[:, :1]).all(dim=1)


def _column(scores: list[dict[str, float]], key: str) -> Tensor:
    if wrong := [score for score in scores if not (isinstance(score, dict) and key in score)]:
        raise ValueError(f"reward_fn returned {wrong[0]!r}, not a dict with all of its three scores: {key!r}")
    return torch.tensor([score[key] for score in scores], dtype=torch.float32)
