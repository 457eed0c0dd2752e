"""Weights as one buffer of bytes, packed by the Learner and read by every engine, also in place on a GPU."""

import math
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Union

import numpy as np
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from grpo_ray.learning.device import lock_pages, whole_pages
from grpo_ray.transfer.messages import CHUNK_BYTES, DeviceHandle, TensorSpec, WeightSnapshot, chunks

if TYPE_CHECKING:  # it imports transformers
    from grpo_ray.learning.hub_format import LazyWeight

ALIGNMENT_BYTES = 64  # any dtype can be viewed in place


Weight = Union[torch.Tensor, "LazyWeight"]
NamedWeights = Iterable[tuple[str, Weight]]


def pack_weights(
    named_tensors: NamedWeights, version: int, dtype: torch.dtype, with_checksum: bool = False,
    memory: "ReusedMemory | None" = None,
) -> WeightSnapshot:  # fmt: skip
    """Copy floating-point tensors, cast to `dtype`, and others as they are, into one CPU buffer of `memory`."""
    reused = memory or ReusedMemory()
    specs, buffer = pack(named_tensors, dtype, lambda num_bytes: torch.from_numpy(reused.take(num_bytes)))
    data = buffer.numpy()
    return WeightSnapshot(version, specs, data, zlib.crc32(data.data) if with_checksum else None)


def pack_on_device(
    named_tensors: NamedWeights, version: int, dtype: torch.dtype, device: torch.device
) -> tuple[WeightSnapshot, list[torch.Tensor]]:
    """Pack like `pack_weights`, but into buffers on a GPU, which the caller keeps while they may be loaded.

    Each is one of `chunks`, so that no memory of the size of all weights is needed in one piece.
    """
    tensors, specs, num_bytes = _layout(named_tensors, dtype)
    buffers, first = [], 0
    for chunk in chunks(specs, num_bytes, CHUNK_BYTES):
        buffers.append(torch.empty(chunk.end - chunk.start, dtype=torch.uint8, device=device))
        _fill(tensors[first : first + len(chunk.specs)], chunk.rebased(), buffers[-1])
        first += len(chunk.specs)
    handles = tuple(map(share, buffers))
    return WeightSnapshot(version, specs, np.empty(0, np.uint8), on_device=handles), buffers


class ReusedMemory:
    """One buffer of host memory at a time, and again the same once the caller has dropped it.

    Touching fresh pages takes longer than a copy into them.
    """

    def __init__(self, is_pinned: bool = False) -> None:
        """Take no memory yet; if `is_pinned`, it is page-locked, and a GPU copies to it at full speed."""
        self._is_pinned = is_pinned
        self._memory: torch.Tensor | None = None
        self._taken: weakref.ref[np.ndarray] | None = None

    def take(self, num_bytes: int) -> np.ndarray:
        """Return a uint8 array; the memory is used again only when neither it nor a view of it is left."""
        is_free = self._taken is None or self._taken() is None
        if self._memory is None or self._memory.numel() != num_bytes or not is_free:
            self._memory = None  # before the next one is made
            self._memory = host_zeros(num_bytes, self._is_pinned)
        array: np.ndarray = self._memory.numpy()
        self._taken = weakref.ref(array)
        return array


def host_zeros(num_bytes: int, is_pinned: bool) -> torch.Tensor:
    """Return memory for a snapshot, uint8; what stays between tensors would count as changes in a delta."""
    return (
        lock_pages(whole_pages(num_bytes).zero_()) if is_pinned else torch.zeros(num_bytes, dtype=torch.uint8)
    )


def pack(
    named_tensors: NamedWeights, dtype: torch.dtype, room: Callable[[int], torch.Tensor]
) -> tuple[tuple[TensorSpec, ...], torch.Tensor]:
    """Copy the tensors into one buffer (uint8); `room` returns the memory for a number of bytes."""
    tensors, specs, num_bytes = _layout(named_tensors, dtype)
    buffer = room(num_bytes)
    _fill(tensors, specs, buffer)
    return specs, buffer


def _layout(
    named_tensors: NamedWeights, dtype: torch.dtype
) -> tuple[list[tuple[str, Weight]], tuple[TensorSpec, ...], int]:
    """Return the tensors, their places with the dtypes that they are cast to, and the bytes of all."""
    tensors, specs, offset = list(named_tensors), [], 0
    for name, tensor in tensors:
        is_kept = getattr(tensor, "keeps_dtype", False) or not tensor.dtype.is_floating_point
        wire_dtype = tensor.dtype if is_kept else dtype
        num_bytes = tensor.shape.numel() * wire_dtype.itemsize
        specs.append(
            TensorSpec(name, str(wire_dtype).removeprefix("torch."), tuple(tensor.shape), offset, num_bytes)
        )
        offset += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return tensors, tuple(specs), offset


def _fill(tensors: NamedWeights, specs: Iterable[TensorSpec], buffer: torch.Tensor) -> None:
    for (_, view), (_, tensor) in zip(unpack_weights(specs, buffer), tensors, strict=True):
        values = tensor.detach()
        if values.device != buffer.device:
            values = values.to(view.dtype)  # there, so that no more bytes than needed are sent
        view.copy_(values, non_blocking=True)
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()  # another stream or process reads it


def check_snapshot(snapshot: WeightSnapshot) -> None:
    """Refuse a snapshot that is incomplete or damaged.

    Raises:
        ValueError: a tensor exceeds the buffer, its size does not match its shape, or the checksum differs.
    """
    for spec in snapshot.specs:
        num_bytes = math.prod(spec.shape) * getattr(torch, spec.dtype).itemsize
        if num_bytes != spec.num_bytes or spec.offset_bytes + spec.num_bytes > snapshot.num_bytes:
            raise ValueError(f"version {snapshot.version} did not arrive complete: {spec.name} is cut off")
    if snapshot.checksum is not None and zlib.crc32(snapshot.data.data) != snapshot.checksum:
        raise ValueError(f"version {snapshot.version} did not arrive complete: its CRC-32 differs")


def unpack_weights(specs: Iterable[TensorSpec], buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a view into `buffer` (uint8) per spec, without copying."""
    for spec in specs:
        flat = buffer[spec.offset_bytes : spec.offset_bytes + spec.num_bytes]
        yield spec.name, flat.view(getattr(torch, spec.dtype)).view(spec.shape)


def as_tensor(data: np.ndarray) -> torch.Tensor:
    """Return a uint8 tensor over the array's memory, which may be read-only and must only be read."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(data)


def share(buffer: torch.Tensor) -> DeviceHandle:
    """Return the handle by which another process on the same GPU reads a flat uint8 tensor in place (`ipc`).

    It has CUDA's interprocess handles, which are valid as long as the caller keeps the tensor.
    """
    _, arguments = reduce_tensor(buffer)
    storage_handle, storage_size, storage_offset = arguments[7:10]
    place = storage_handle, storage_size, storage_offset, *arguments[11:15]
    return DeviceHandle(*[buffer.numel(), *place, gpu_of(buffer.device)])


def gpu_of(device: torch.device) -> str:
    """Return the UUID of a GPU, which is the same in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def open_shared(handle: DeviceHandle, device: torch.device) -> torch.Tensor:
    """Open a shared buffer without copying it; `device` is this process's name for the same GPU."""
    flat = torch.Tensor, torch.Size([handle.num_bytes]), (1,), 0, torch.UntypedStorage, torch.uint8
    storage = handle.storage_handle, handle.storage_size_bytes, handle.storage_offset_bytes
    counter, event = (handle.ref_counter_handle, handle.ref_counter_offset), handle.event_handle
    is_synced = handle.event_sync_required
    index, gradient = device.index or 0, False
    buffer: torch.Tensor = rebuild_cuda_tensor(*flat, index, *storage, gradient, *counter, event, is_synced)
    return buffer
