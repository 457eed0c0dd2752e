"""Tensors of which each rank of the Learner has a part (torch's DTensor), read and filled as a whole."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def whole(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor's values without gradient, gathered from all ranks if it is sharded.

    Args:
        dtype: cast to it first, so that fewer bytes are gathered.
    """
    values = tensor.detach() if dtype is None else tensor.detach().to(dtype)
    return values.full_tensor() if isinstance(values, DTensor) else values


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, which is all of it if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_like(tensor: Tensor, other: Tensor | None) -> Tensor:
    """Return this rank's part of a whole tensor if one of `other` is sharded and has its shape."""
    if not isinstance(other, DTensor) or tensor.shape != other.shape:
        return tensor
    # `distribute_tensor` would move it to the mesh's device, where a colocated Generator may be.
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, other.device_mesh, other.placements)
    part = tensor[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]
    result = torch.empty_like(other, dtype=tensor.dtype, requires_grad=False)
    assert isinstance(result, DTensor)
    result.to_local().copy_(part)
    return result


class ShardedWeight:
    """A sharded weight, gathered from all ranks by each `detach`, in the dtype that is sent."""

    def __init__(self, shard: Tensor, dtype: torch.dtype) -> None:
        self._shard, self.shape, self.dtype = shard, shard.shape, dtype

    def detach(self) -> Tensor:
        return whole(self._shard, self.dtype)


class WeightInBlock:
    """A weight of a sharded model; `detach` has FSDP2 gather its whole block, as a forward pass does."""

    def __init__(
        self, weight: Any, dtype: torch.dtype, place: "_Place", gather: Callable[[FSDPModule], None]
    ) -> None:
        """`weight` is a parameter, or computed from its layer's parameters by its own `detach`."""
        self._weight, self._place, self._gather = weight, place, gather
        self.shape, self.dtype = weight.shape, dtype

    def detach(self) -> Tensor:
        self._gather(self._place.block)
        is_parameter = isinstance(self._weight, DTensor)  # which FSDP2 has replaced by the whole one
        weight = getattr(self._place.module, self._place.name) if is_parameter else self._weight
        values: Tensor = weight.detach()
        return values


@dataclass(frozen=True)
class _Place:
    block: FSDPModule
    module: nn.Module
    name: str  # of the parameter in its module


@contextmanager
def gathered(
    model: Any, weights: Iterable[tuple[str, Any]], dtype: torch.dtype, by_block: bool = True
) -> Iterator[list[tuple[str, Any]]]:
    """Yield the weights; those of a sharded model gather themselves when they are read, in `dtype`.

    All ranks have to read all of them, in this order.

    Args:
        by_block: gather all weights of a block together, which takes far fewer collectives; otherwise only
            those that are asked for, one by one.
    """
    if not isinstance(model, FSDPModule):
        yield list(weights)
        return
    if not by_block:
        yield [(name, ShardedWeight(weight, dtype)) for name, weight in weights]
        return
    places = _places(model)
    whole_block: FSDPModule | None = None

    def gather(block: FSDPModule | None) -> None:
        nonlocal whole_block
        if block is not whole_block:
            if whole_block is not None:
                whole_block.reshard()
            if block is not None:
                block.unshard()
            whole_block = block

    try:
        yield [
            (name, WeightInBlock(weight, dtype, place, gather) if place else weight)  # a buffer is whole
            for name, weight in weights
            for place in [places.get(id(getattr(weight, "layer", weight)))]
        ]
    finally:
        gather(None)


def _places(model: Any) -> dict[int, _Place]:
    """Return the place of each parameter, and of each module, by its id."""
    blocks: dict[str, FSDPModule] = {}
    places: dict[int, _Place] = {}
    for path, module in model.named_modules():
        blocks[path] = module if isinstance(module, FSDPModule) else blocks[path.rpartition(".")[0]]
        places[id(module)] = _Place(blocks[path], module, "")
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), _Place(blocks[path], module, name))
    return places
