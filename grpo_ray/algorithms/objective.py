"""The training objective: a policy-gradient loss, its aggregation and the terms added to it."""

from dataclasses import dataclass

from torch import Tensor

from grpo_ray.algorithms.losses import compute_policy_gradient_loss
from grpo_ray.config.algorithm import RATIO_LOSSES, Aggregation, AlgorithmConfig, KLEstimator, LossType


@dataclass(frozen=True)
class Objective:
    """Everything about the loss except the data."""

    loss_type: LossType
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

    @classmethod
    def from_config(cls, config: AlgorithmConfig) -> "Objective":
        low, high = config.clip_epsilons
        return cls(
            loss_type=config.loss,
            aggregation=config.loss_aggregation,
            cliprange=low,
            cliprange_high=high,
            dual_clip=config.dual_clip,
            kl_coefficient=config.kl.coefficient,
            kl_estimator=config.kl.estimator,
            entropy_bonus=config.entropy_bonus,
        )

    @property
    def needs_old_log_probs(self) -> bool:
        return self.loss_type in RATIO_LOSSES

    def policy_gradient_loss(
        self, policy_log_probs: Tensor, mask: Tensor, advantages: Tensor | None, old_log_probs: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute `compute_policy_gradient_loss` with this objective's loss and clip ranges.

        Args:
            policy_log_probs: `[batch, seq]`.
            mask: `[batch, seq]`, bool.
            advantages: `[batch, 1]` or `[batch, seq]`; the raw rewards for `no_baseline`.
            old_log_probs: `[batch, seq]`, for the ratio losses.
        """
        return compute_policy_gradient_loss(
            policy_log_probs,
            self.loss_type,
            raw_rewards=advantages,
            advantages=advantages,
            old_log_probs=old_log_probs,
            cliprange=self.cliprange,
            response_mask=mask,
            cliprange_high=self.cliprange_high,
            dual_clip=self.dual_clip,
        )
