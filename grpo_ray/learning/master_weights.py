"""Float32 weights for the optimizer beside the model's copy of them, which has the dtype of the sampler."""

from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from grpo_ray.learning.device import Offload


class MasterWeights:
    """The weights that the optimizer updates; the model computes in a copy of them in its own dtype.

    Forward and backward passes then run entirely in the sampler's dtype, residual stream included, while
    changes far below bfloat16's resolution still add up (Micikevicius et al. 2018, Mixed Precision Training,
    section 3.1). Each backward pass adds its gradient to the `.grad` of the master and frees its own, so that
    micro-batches are summed in float32.

    Parameters that have `dtype` already are their own masters, and nothing is copied. So are sharded ones,
    which FSDP2 casts as it gathers them.
    """

    def __init__(
        self, model: nn.Module, dtype: torch.dtype,
        trained: Iterable[tuple[str, nn.Parameter]] | None = None,
    ) -> None:  # fmt: skip
        """Turn the parameters of `model` into copies in `dtype`; its buffers stay as they are.

        (With rotary frequencies in bfloat16, the angle at position 1,000 would be off by 1.2 rad.)

        Args:
            trained: the parameters with names, if they are not all of the model's; the others have no masters.
        """
        self._model, self._is_whole = model, trained is None
        self._copies: list[tuple[nn.Parameter, nn.Parameter]] = []  # the model's parameter, its master
        self.named: dict[str, nn.Parameter] = {}  # masters by the name of the model's parameter
        for name, parameter in model.named_parameters() if trained is None else trained:
            is_own = parameter.dtype == dtype or isinstance(parameter, DTensor)
            self.named[name] = parameter if is_own else self._narrow(parameter, dtype)

    def _narrow(self, parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
        """Cast the model's parameter in place; return its master, which takes over the memory."""
        master = nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
        parameter.data = master.data.to(dtype)
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(partial(_hand_over_gradient, master))
        self._copies.append((parameter, master))
        return master

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.named.values())

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the masters into the model's copy, after they have changed."""
        for copy, master in self._copies:
            copy.copy_(master)

    def to(self, device: torch.device, offload: Offload, are_constant: bool = False) -> None:
        """Move the model and the masters.

        Args:
            are_constant: no weight ever changes; otherwise that is true of weights without a master alone.
        """
        state = list(self._model.state_dict(keep_vars=True).values())
        changing = {id(tensor) for pair in [*self._copies, self.named.values()] for tensor in pair}
        frozen = [t for t in state if isinstance(t, nn.Parameter) and (are_constant or id(t) not in changing)]
        masters = [master for _, master in self._copies]
        offload.move(frozen, device, are_constant=True)
        offload.move([*(t for t in state if id(t) in changing), *masters], device, are_constant)
        self._model.to(device)  # the rest: buffers, and tensors that move by themselves

    @torch.no_grad()
    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Load values by name; masters without any keep theirs, and values of buffers are ignored."""
        for name in weights.keys() & self.named.keys():
            self.named[name].copy_(weights[name])
        self.refresh()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the model's state with the masters' values; tied weights share a tensor.

        Of a model that is trained in part, return that part.
        """
        if not self._is_whole:
            return dict(self.named)
        masters: dict[int, torch.Tensor] = {id(copy): master for copy, master in self._copies}
        state = self._model.state_dict(keep_vars=True)
        return {name: masters.get(id(tensor), tensor) for name, tensor in state.items()}


def _hand_over_gradient(master: nn.Parameter, copy: nn.Parameter) -> None:
    gradient, copy.grad = copy.grad, None
    assert gradient is not None
    if master.grad is None:
        master.grad = gradient.to(master.dtype)
    else:
        master.grad.add_(gradient)
