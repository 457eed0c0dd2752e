"""The reference policy that KL is measured against: frozen, refreshed periodically, or a moving average."""

import copy
from collections.abc import Mapping

import torch

from grpo_ray.config.algorithm import KLConfig
from grpo_ray.policy.model import PolicyModel


class Reference:
    """A second model, without optimizer or gradients.

    A frozen one is held in the served dtype. A moving average is held in float32, because its small steps would
    be rounded away in bfloat16.
    """

    def __init__(self, policy: PolicyModel, config: KLConfig, dtype: torch.dtype) -> None:
        """Start as a copy of `policy`."""
        self._config = config
        self.model: PolicyModel = copy.deepcopy(policy).requires_grad_(False).eval()
        if config.reference == "initial":
            self.model.to(dtype)

    @property
    def moves(self) -> bool:
        """True if its weights change during the run and belong in a checkpoint."""
        return self._config.reference == "ema" or self._config.refresh_every_num_steps is not None

    @torch.no_grad()
    def follow(self, policy: PolicyModel, step: int) -> None:
        """Update the reference after step `step`: move towards the policy, or copy it when a refresh is due."""
        every = self._config.refresh_every_num_steps
        if self._config.reference == "ema":
            weight = 1.0 - self._config.ema_decay
        elif every is not None and step % every == 0:
            weight = 1.0
        else:
            return
        for own, new in zip(self.model.parameters(), policy.parameters(), strict=True):
            own.lerp_(new.to(own.dtype), weight)

    @torch.no_grad()
    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Load weights from a checkpoint."""
        for name, parameter in self.model.named_parameters():
            parameter.copy_(weights[name])

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the weights that belong in a checkpoint; none if they do not change."""
        return dict(self.model.named_parameters()) if self.moves else {}
