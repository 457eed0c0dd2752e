"""The training objective: a policy-gradient loss, its aggregation and the terms added to it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from grpo_ray.algorithms.correction import correction_weights
from grpo_ray.algorithms.inputs import CorrectionInputs, Details, arguments_of, uses_ratio
from grpo_ray.algorithms.losses import apply_loss
from grpo_ray.algorithms.registry import correction_function, loss_function
from grpo_ray.config.algorithm import Aggregation, AlgorithmConfig, KLEstimator, TokenSelection


@dataclass(frozen=True)
class Objective:
    """Everything about the loss except the data."""

    loss_type: str
    """One of `LossType`, or the user's own as `module:function`."""
    aggregation: Aggregation
    cliprange: float | None = 0.2
    """Epsilon below 1, and also above unless `cliprange_high` is given; None for losses that do not clip."""
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
        low, high = config.clip_epsilons
        return cls(
            loss_type=config.loss,
            aggregation=config.loss_aggregation,
            cliprange=low,
            cliprange_high=high,
            dual_clip=config.dual_clip,
            kl_coefficient=config.kl.loss_coefficient,
            kl_estimator=config.kl.estimator,
            entropy_bonus=config.entropy_bonus,
            loss_options=config.loss_options,
            corrections=config.corrections,
            correction_options={
                **config.correction_options,
                "cap": config.correction_cap,
                "band": config.correction_band,
            },
            selection=config.token_selection,
            selection_options=config.selection_options,
        )

    @property
    def needs_old_log_probs(self) -> bool:
        has_ratio_in_kl = bool(self.kl_coefficient) and self.kl_estimator == "unbiased"
        return uses_ratio(loss_function(self.loss_type)) or has_ratio_in_kl or self.selection == "kl_cov"

    def policy_gradient_loss(
        self, policy_log_probs: Tensor, mask: Tensor, advantages: Tensor | None, old_log_probs: Tensor | None
    ) -> tuple[Tensor, Details]:
        """Compute this objective's loss per token, with its clip ranges and options; see `apply_loss`.

        Args:
            policy_log_probs: `[batch, seq]`.
            mask: `[batch, seq]`, bool.
            advantages: `[batch, 1]` or `[batch, seq]`; the raw rewards for `no_baseline`.
            old_log_probs: `[batch, seq]`, for the ratio losses.
        """
        ranges = {
            "cliprange": self.cliprange,
            "cliprange_high": self.cliprange_high,
            "dual_clip": self.dual_clip,
        }
        tensors = policy_log_probs, mask, advantages, old_log_probs
        given = {**self.loss_options, **ranges}
        return apply_loss(loss_function(self.loss_type), self.loss_type, *tensors, given)

    def correction_weights(self, inputs: CorrectionInputs) -> tuple[Tensor, Tensor]:
        """Return the weights of this objective's corrections and where they intervened; see correction.py."""
        functions = map(correction_function, self.corrections)
        return correction_weights(inputs, [(f, arguments_of(f, self.correction_options)) for f in functions])
