"""The training objective: a policy-gradient loss, its aggregation and the terms added to it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_args

from torch import Tensor

from grpo_ray.config.algorithm import AlgorithmConfig, KLEstimator, TokenSelection
from grpo_ray.config.losses import LOSS_RECORDS, Aggregation, loss_record, refuse_clip_range
from grpo_ray.objectives.correction import CORRECTIONS, correction_function, correction_weights
from grpo_ray.objectives.inputs import (
    CorrectionInputs,
    Details,
    LossFn,
    LossInputs,
    RatioInputs,
    arguments_of,
    parameters_of,
    refuse_unknown,
    uses_ratio,
)
from grpo_ray.objectives.logprobs import check_rows, check_shape
from grpo_ray.objectives.losses import loss_function

T = TypeVar("T")


@dataclass(frozen=True)
class Objective:
    """Everything about the loss except the data.

    `Objective(name)` is the objective of a configuration with that loss: its defaults are the same.

    Raises:
        ValueError: a name is unknown, a number out of bounds, or a clip range is given to a loss without one.
    """

    loss_type: str
    """One of `LossType`, or the user's own as `module:function`."""
    aggregation: Aggregation = None  # type: ignore[assignment]  # until __post_init__
    """None: the loss's own."""
    cliprange: float | None = None
    """Epsilon below 1, and also above unless `cliprange_high` is given; None: the loss's own."""
    cliprange_high: float | None = None
    dual_clip: float | None = None
    kl_coefficient: float = 0.0
    """Weight of `kl_estimator`, in the loss per nat; 0 only measures."""
    kl_estimator: KLEstimator = "k3"
    entropy_bonus: float = 0.0
    """Weight of the entropy, in the objective per nat."""
    loss_options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the loss function other than the clip ranges."""
    corrections: tuple[str, ...] = ()
    """Names of off-policy corrections; their weights are multiplied."""
    correction_options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments; each goes to the corrections that take it."""
    selection: TokenSelection = "none"
    selection_options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: AlgorithmConfig) -> "Objective":
        limits: dict[str, Any] = {"cap": config.correction_cap, "band": config.correction_band}
        return cls(
            loss_type=config.loss,
            aggregation=config.loss_aggregation,
            cliprange=config.cliprange,
            cliprange_high=config.cliprange_high,
            dual_clip=config.dual_clip,
            kl_coefficient=config.kl.loss_coefficient,
            kl_estimator=config.kl.estimator,
            entropy_bonus=config.entropy_bonus,
            loss_options=config.loss_options,
            corrections=config.corrections,
            correction_options={**config.correction_options, **(limits if config.corrections else {})},
            selection=config.token_selection,
            selection_options=config.selection_options,
        )

    def __post_init__(self) -> None:
        own = [self.loss_type] if ":" in self.loss_type else []
        for what, name, allowed in (
            ("loss", self.loss_type, (*LOSS_RECORDS, *own)),
            ("aggregation", self.aggregation, get_args(Aggregation)),
            ("KL estimator", self.kl_estimator, get_args(KLEstimator)),
            ("token selection", self.selection, get_args(TokenSelection)),
            *(("correction", name, CORRECTIONS) for name in self.corrections if ":" not in name),
        ):
            if name is not None and name not in allowed:
                raise ValueError(f"unknown {what} {name!r}; allowed: {', '.join(allowed)}")
        for name, least in (("cliprange", 0), ("cliprange_high", 0), ("dual_clip", 1)):
            if (value := getattr(self, name)) is not None and not value > least:
                raise ValueError(f"{name} is {value:g}; it must be above {least}")
        if self.correction_options and not self.corrections:
            raise ValueError("correction_options need corrections; leave them out")
        if self.selection_options and self.selection == "none":
            raise ValueError("selection_options need a selection; leave them out")
        for name in ("kl_coefficient", "entropy_bonus"):
            if not (value := getattr(self, name)) >= 0:
                raise ValueError(f"{name} is {value:g}; it must be at least 0")
        if self.dual_clip is not None and self.loss_type not in ("grpo_clip", *own):
            raise ValueError(f"dual_clip works only with `grpo_clip`, but the loss is `{self.loss_type}`")
        if loss_record(self.loss_type).epsilons is None:
            refuse_clip_range(self.loss_type, cliprange=self.cliprange, cliprange_high=self.cliprange_high)
        elif not own:  # which is imported only to be computed, and not by a report
            low, high = loss_record(self.loss_type).clip_epsilons(self.cliprange, self.cliprange_high)
            object.__setattr__(self, "cliprange", low)
            object.__setattr__(self, "cliprange_high", high)
        if self.aggregation is None:
            object.__setattr__(self, "aggregation", loss_record(self.loss_type).aggregation)

    @property
    def has_plain_gradient(self) -> bool:
        """True if a token's gradient is its advantage times its share in the aggregation, but for ratios."""
        is_bent = self.loss_type == "vespo" or self.loss_options.get("kl_tau")  # weights that fade; a pull back
        return not (self.kl_coefficient or is_bent)

    @property
    def needs_old_log_probs(self) -> bool:
        has_ratio_in_kl = bool(self.kl_coefficient) and self.kl_estimator == "unbiased"
        return uses_ratio(loss_function(self.loss_type)) or has_ratio_in_kl or self.selection == "kl_cov"

    def policy_gradient_loss(
        self, policy_log_probs: Tensor, mask: Tensor, advantages: Tensor | None, old_log_probs: Tensor | None
    ) -> tuple[Tensor, Details]:
        """Call the loss function with the dataclass that it is annotated with, its clip ranges and options.

        Args:
            policy_log_probs, mask: `[batch, seq]`.
            advantages: `[batch, 1]` or `[batch, seq]`; the raw rewards for `no_baseline`.
            old_log_probs: `[batch, seq]`, for the ratio losses.

        Returns:
            The loss `[batch, seq]`, without mask and mean, and the details of the function.

        Raises:
            ValueError: an argument that the loss needs is missing, a shape differs, or it takes no such option.
        """
        name, function = self.loss_type, loss_function(self.loss_type)
        refuse_unknown(f"the loss {name}", [function], self.loss_options)
        advantages = required("raw_rewards" if name == "no_baseline" else "advantages", advantages, name)
        check_rows("advantages", advantages, policy_log_probs)
        check_shape("response_mask", mask, policy_log_probs)
        inputs = LossInputs(policy_log_probs, advantages, mask.bool())
        if uses_ratio(function):
            old_log_probs = required("old_log_probs", old_log_probs, name)
            check_shape("old_log_probs", old_log_probs, policy_log_probs)
            inputs = RatioInputs(policy_log_probs, advantages, mask.bool(), old_log_probs)
        given = arguments_of(function, {**self._ranges(function), **self.loss_options})
        for parameter in parameters_of(function).values():
            if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
                required(parameter.name, given.get(parameter.name), name)
        loss, found = function(inputs, **given)
        check_shape(f"the loss of {name}", loss, policy_log_probs)
        return loss, found

    def _ranges(self, function: LossFn) -> dict[str, Any]:
        """Return the clip ranges, of which the loss function gets those that it takes and that are not None."""
        low, high = loss_record(self.loss_type).clip_epsilons(self.cliprange, self.cliprange_high)
        ranges = {"cliprange": low, "cliprange_high": high, "dual_clip": self.dual_clip}
        if ":" in self.loss_type:
            given = [name for name in ranges if getattr(self, name) is not None]
            refuse_unknown(f"the loss `{self.loss_type}`", [function], dict.fromkeys(given))
            own = {} if given else parameters_of(function)  # of which defaults stay
            ranges = {n: v for n, v in ranges.items() if n not in own or own[n].default is own[n].empty}
        return ranges

    def correction_weights(self, inputs: CorrectionInputs) -> tuple[Tensor, Tensor]:
        """Return the weights of this objective's corrections and where they intervened; see correction.py.

        Raises:
            ValueError: no correction takes one of `correction_options`.
        """
        functions = [correction_function(name) for name in self.corrections]
        own = {name: value for name, value in self.correction_options.items() if name not in ("cap", "band")}
        refuse_unknown(f"the corrections ({', '.join(self.corrections)})", functions, own)
        return correction_weights(inputs, [(f, arguments_of(f, self.correction_options)) for f in functions])


class EntropyBonus:
    """The coefficient of the entropy in the objective, constant or adapted after every step.

    With a target (Skywork-OR1, arXiv:2505.22312): after a step with an entropy at or below the target
    the coefficient rises by `entropy_step`, otherwise it falls. It acts only after a step at or below it.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self._config = config
        self._coefficient, self._is_low = config.entropy_bonus, config.entropy_target is None

    @property
    def weight(self) -> float:
        """The weight in effect, in the objective per nat."""
        return self._coefficient if self._is_low else 0.0

    def observe(self, entropy: float | None) -> None:
        """Adapt to the policy's mean entropy in the step, in nats per token; None if nothing was measured."""
        target = self._config.entropy_target
        if target is None or entropy is None or math.isnan(entropy):
            return
        self._is_low = entropy <= target
        change = self._config.entropy_step if self._is_low else -self._config.entropy_step
        self._coefficient = min(max(self._coefficient + change, 0.0), self._config.entropy_bonus_max)

    def state(self) -> dict[str, float]:
        """Return what a checkpoint keeps; empty for a constant."""
        if self._config.entropy_target is None:
            return {}
        return {"entropy_coefficient": self._coefficient, "entropy_is_low": float(self._is_low)}

    def restore(self, state: Mapping[str, float]) -> None:
        """Restore `state`, if the checkpoint has it and the configuration still adapts."""
        if self._config.entropy_target is not None and "entropy_coefficient" in state:
            self._coefficient = min(state["entropy_coefficient"], self._config.entropy_bonus_max)
            self._is_low = bool(state["entropy_is_low"])


def required(name: str, value: T | None, loss_type: str) -> T:
    if value is None:
        raise ValueError(f"loss_type {loss_type!r} needs {name}")
    return value
