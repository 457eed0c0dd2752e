"""The form of advantages, losses and corrections: their arguments, one frozen dataclass each, and results.

A function of the user's own has the same form as the package's.
"""

import inspect
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import Any, TypeVar, get_type_hints

import torch
from torch import Tensor

from grpo_ray.config.user_code import import_function
from grpo_ray.objectives.logprobs import check_rows, check_shape, clamped_exp

T = TypeVar("T")

Details = dict[str, Tensor]


@dataclass(frozen=True)
class AdvantageInputs:
    """The arguments of an advantage: groups of graded responses, one group per row."""

    rewards: Tensor  # float [groups, G], penalties for length or KL subtracted
    format_rewards: Tensor  # float [groups, G], 0 or 1; of an episode 1 if it finished by itself
    answer_rewards: Tensor  # float [groups, G], 0 or 1; of an episode 1 if its reward is positive
    lengths: Tensor  # float [groups, G], sampled tokens; of an episode those of all its turns
    terms: Mapping[str, Tensor] = field(default_factory=dict)
    """The rewards of a sum's terms by name, unweighted, float `[groups, G]`; NaN where one does not apply."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """The weights of the terms."""


@dataclass(frozen=True)
class LossInputs:
    """The arguments of a loss: one row per response; in a run, log-probabilities outside the mask are 0."""

    policy_log_probs: Tensor  # [batch, seq], nats, differentiated
    advantages: Tensor  # [batch, 1], or [batch, seq] if turns have their own; the raw rewards for `no_baseline`
    mask: Tensor  # bool [batch, seq], true at the tokens in the loss


@dataclass(frozen=True)
class RatioInputs(LossInputs):
    """The arguments of a loss with a ratio; tokens without a finite old logprob are outside the mask."""

    old_log_probs: Tensor  # [batch, seq], nats, not differentiated

    @property
    def log_ratio(self) -> Tensor:
        """log(pi / pi_old), `[batch, seq]`, with the gradient of `policy_log_probs`."""
        return self.policy_log_probs - self.old_log_probs.detach()


@dataclass(frozen=True)
class CorrectionInputs:
    """The arguments of a correction; nothing is differentiated."""

    log_ratio: Tensor  # [batch, seq], nats, policy before the first update / sampler; 0 outside the mask
    drift: Tensor  # [batch, seq], nats, sampler / current policy; 0 outside the mask
    advantages: Tensor  # [batch, 1], or [batch, seq] if turns have their own
    mask: Tensor  # bool [batch, seq], true at the sampled tokens with a finite logprob of the sampler

    @classmethod
    def of(
        cls, first: Tensor, behaviour: Tensor, mask: Tensor, advantages: Tensor, current: Tensor | None = None
    ) -> "CorrectionInputs":
        """Make them of log-probabilities `[batch, seq]`: before the first update, the sampler's and current."""
        check_shape("behaviour", behaviour, first)
        check_rows("advantages", advantages, first)
        mask = mask.bool() & behaviour.isfinite()
        current = first if current is None else current
        log_ratio, drift = first - behaviour, behaviour - current
        return cls(
            log_ratio.detach().masked_fill(~mask, 0.0), drift.detach().masked_fill(~mask, 0.0), advantages, mask
        )

    @property
    def ratio(self) -> Tensor:
        """The policy's probability over the sampler's, `[batch, seq]`; the log is clamped to [-20, 20]."""
        return clamped_exp(self.log_ratio)


AdvantageFn = Callable[..., Tensor]
"""A function of `AdvantageInputs` and its own keyword arguments. It returns the advantages `[groups, G]`. If it
has arguments `eps` and `std`, they are `algorithm.advantage_eps` and `algorithm.std`."""
LossFn = Callable[..., tuple[Tensor, Details]]
"""A function of `LossInputs` or `RatioInputs` and its own keyword arguments. It returns the loss per token
`[batch, seq]`, without mask and mean, and details without gradient. Of these `clipped` (bool `[batch, seq]`,
true where a bound takes effect) and `ratio` (`[batch, seq]`) together become the metrics `loss/clip_frac`."""
CorrectionFn = Callable[..., tuple[Tensor, Tensor]]
"""A function of `CorrectionInputs` and its own keyword arguments. It returns the factors of the token losses,
and where they are truncated or 0 (bool), each `[batch, seq]` or `[batch, 1]`."""


def row_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of each row's values `[batch, seq]` under the mask, `[batch, 1]`."""
    return values.masked_fill(~mask, 0.0).sum(dim=1, keepdim=True)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of each row's values `[batch, seq]` under the mask, `[batch, 1]`; 0 without tokens."""
    return row_sum(values, mask) / mask.sum(dim=1, keepdim=True).clamp(min=1)


def ones(inputs: LossInputs | CorrectionInputs) -> Tensor:
    """Return 1 at every token, `[batch, seq]`."""
    return torch.ones_like(inputs.mask, dtype=inputs.advantages.dtype)


@cache
def uses_ratio(loss_fn: LossFn) -> bool:
    """Return True if the loss function's first parameter is annotated with RatioInputs.

    Raises:
        ValueError: it is annotated with neither RatioInputs nor LossInputs.
    """
    first = next(iter(inspect.signature(loss_fn).parameters), None)
    annotation = get_type_hints(loss_fn).get(first or "")
    if annotation not in (LossInputs, RatioInputs):
        raise ValueError(
            "the first parameter must be annotated with LossInputs, or with RatioInputs to receive "
            "old_log_probs (both in grpo_ray.objectives)"
        )
    return annotation is RatioInputs


@cache
def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters after the first, by name."""
    return dict(list(inspect.signature(function).parameters.items())[1:])


def takes_any(function: Callable[..., Any]) -> bool:
    """Return True if the function takes keyword arguments of any name."""
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters_of(function).values())


def refuse_unknown(what: str, functions: Sequence[Callable[..., Any]], given: Mapping[str, Any]) -> None:
    """Refuse a keyword argument that none of the functions takes.

    Raises:
        ValueError: names it, and those that they take.
    """
    if any(map(takes_any, functions)):
        return
    names = {name for function in functions for name in parameters_of(function)}
    if unknown := [name for name in given if name not in names]:
        raise ValueError(f"{what} has no option {unknown[0]!r}; it takes {', '.join(sorted(names)) or 'none'}")


def arguments_of(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the given arguments that the function takes, without None."""
    taken = given if takes_any(function) else parameters_of(function)
    return {name: value for name, value in given.items() if value is not None and name in taken}


def named(name: str, own: Mapping[Any, Callable[..., T]], field: str) -> Callable[..., T]:
    """Return the function with this name, or import `module:function`: the user's, where a run is trained.

    `report` and `evaluate` call none of these, and `audit` only if the command line says so.
    """
    return _with_its_place(import_function(name, field), f"{field}: {name}") if ":" in name else own[name]


@cache
def _with_its_place(function: Callable[..., T], what: str) -> Callable[..., T]:
    """Return a function of the user's own; an error notes its place, which no other process could see."""

    @wraps(function)
    def noted(*args: Any, **options: Any) -> T:
        try:
            return function(*args, **options)
        except Exception as error:
            for frame in traceback.extract_tb(error.__traceback__)[1:2]:
                error.add_note(f"in {what} ({os.path.basename(frame.filename)}:{frame.lineno})")
            raise

    return noted
