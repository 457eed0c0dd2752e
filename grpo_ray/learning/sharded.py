"""Tensors of which each rank of the Learner has a part (torch's DTensor), read and filled as a whole."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from grpo_ray.learning.hub_format import LazyWeight


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
        yield [(name, LazyWeight(w.shape, dtype, partial(whole, w, dtype))) for name, w in weights]
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

    def read(weight: Any, place: _Place) -> Tensor:
        gather(place.block)  # as a forward pass does
        is_parameter = isinstance(weight, DTensor)  # which FSDP2 has replaced by the whole one
        values: Tensor = (getattr(place.module, place.name) if is_parameter else weight).detach()
        return values

    try:
        yield [
            (name, LazyWeight(w.shape, dtype, partial(read, w, place)) if place else w)  # a buffer is whole
            for name, w in weights
            for place in [places.get(id(getattr(w, "layer", w)))]
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
