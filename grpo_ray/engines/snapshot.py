"""Weights as one buffer of bytes: packed by the Learner, read by every engine."""

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from grpo_ray.types import TensorSpec, WeightSnapshot

ALIGNMENT_BYTES = 64  # so that any dtype can be viewed in place


def pack_weights(
    named_tensors: Iterable[tuple[str, torch.Tensor]], version: int, dtype: torch.dtype
) -> WeightSnapshot:
    """Copy floating-point tensors, cast to `dtype`, and others as they are, into one CPU buffer."""
    tensors = [(n, t.detach(), dtype if t.is_floating_point() else t.dtype) for n, t in named_tensors]
    specs, offset = [], 0
    for name, tensor, wire_dtype in tensors:
        num_bytes = tensor.numel() * wire_dtype.itemsize
        specs.append(
            TensorSpec(name, str(wire_dtype).removeprefix("torch."), tuple(tensor.shape), offset, num_bytes)
        )
        offset += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    buffer = torch.empty(offset, dtype=torch.uint8)
    for spec, (_, tensor, wire_dtype) in zip(specs, tensors, strict=True):
        view = buffer[spec.offset_bytes : spec.offset_bytes + spec.num_bytes].view(wire_dtype)
        view.view(tensor.shape).copy_(tensor)
    return WeightSnapshot(version, tuple(specs), buffer.numpy())


def unpack_weights(specs: Iterable[TensorSpec], buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Views into `buffer` (uint8), one a spec, without copying."""
    for spec in specs:
        flat = buffer[spec.offset_bytes : spec.offset_bytes + spec.num_bytes]
        yield spec.name, flat.view(getattr(torch, spec.dtype)).view(spec.shape)


def as_tensor(data: np.ndarray) -> torch.Tensor:
    """A uint8 tensor over the array's memory; the array may be read-only, and must only be read."""
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(data)
