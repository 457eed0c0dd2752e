"""The weight of the entropy bonus, which may follow a target."""

from collections.abc import Mapping

from grpo_ray.config.algorithm import AlgorithmConfig


class EntropyBonus:
    """The coefficient of the entropy in the objective, constant or adapted after every step.

    With a target (Skywork-OR1, arXiv:2505.22312): after a step with an entropy at or below the
    target the coefficient rises by `entropy_step`, otherwise it falls. It acts only in the step after one at or
    below the target.
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
        if target is None or entropy is None:
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
            self._coefficient, self._is_low = state["entropy_coefficient"], bool(state["entropy_is_low"])
