"""The reference policy that KL is measured against: frozen, refreshed periodically, or a moving average."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from grpo_ray.config.algorithm import KLConfig
from grpo_ray.learning.adapters import trained_parameters
from grpo_ray.learning.master_weights import MasterWeights
from grpo_ray.learning.policy_model import PolicyModel


class Reference:
    """A second model in the policy's dtype, without optimizer or gradients.

    A frozen one starts as a plain copy of the policy's weights in that dtype, and so has the policy's
    log-probabilities to the last bit. A moving average keeps float32 weights beside them, because its small
    steps would be rounded away in bfloat16.
    """

    def __init__(self, model: PolicyModel, config: KLConfig, dtype: torch.dtype) -> None:
        """Take over a model that nothing else uses: in float32 if it is to move, else in the policy's dtype."""
        self._config = config
        self.model = model.eval()  # open to gradients, so that it is compiled as the policy
        self.masters = MasterWeights(self.model, dtype)

    @contextmanager
    def in_use(self) -> Iterator[PolicyModel]:
        """Yield the model that computes the reference's log-probabilities, for the block alone."""
        yield self.model

    @property
    def moves(self) -> bool:
        """True if its weights change during the run and belong in a checkpoint."""
        return self._config.reference == "ema" or self._config.refresh_every_num_steps is not None

    @torch.no_grad()
    def follow(self, policy: MasterWeights, step: int) -> None:
        """Update the reference after step `step`: move towards the policy, or copy it when a refresh is due."""
        every = self._config.refresh_every_num_steps
        if self._config.reference == "ema":
            weight = 1.0 - self._config.ema_decay
        elif every is not None and step % every == 0:
            weight = 1.0
        else:
            return
        for own, new in zip(self.masters.parameters, policy.parameters, strict=True):
            own.lerp_(new.to(own.dtype), weight)
        self.masters.refresh()

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return the weights that belong in a checkpoint; none if they do not change."""
        return self.masters.named if self.moves else {}


class AdapterReference(Reference):
    """Earlier values of a policy's adapter, which take their turn on the base that both share.

    A new adapter changes nothing, so with it the frozen reference is the base itself.
    """

    def __init__(self, policy: PolicyModel, config: KLConfig, dtype: torch.dtype) -> None:
        """Start as a copy of the parameters of `policy` that are trained."""
        self._config, self.model = config, policy
        trained = dict(trained_parameters(policy))
        self._in_model = list(trained.values())
        kept = dtype if config.reference == "initial" else None
        values = (p.detach().to(kept or p.dtype, copy=True) for p in self._in_model)
        self._own = nn.ParameterList(nn.Parameter(value, requires_grad=False) for value in values)
        self.masters = MasterWeights(self._own, dtype, zip(trained, self._own, strict=True))

    @contextmanager
    def in_use(self) -> Iterator[PolicyModel]:
        policys = [parameter.detach().clone() for parameter in self._in_model]
        self._fill(self._own)
        try:
            yield self.model
        finally:
            self._fill(policys)

    @torch.no_grad()
    def _fill(self, values: Iterable[torch.Tensor]) -> None:
        """Copy the values in place: FSDP2 holds on to the memory of its shards."""
        for parameter, value in zip(self._in_model, values, strict=True):
            parameter.copy_(value)
