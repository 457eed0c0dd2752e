"""The `ipc` transport: one buffer on a GPU that another process on the same GPU reads in place.

It uses CUDA's interprocess handles, which are valid as long as the process that made the buffer keeps it.
"""

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from grpo_ray.transfer.messages import DeviceHandle


def share(buffer: torch.Tensor) -> DeviceHandle:
    """Return the handle of a flat uint8 tensor on a GPU, which the caller keeps while it may be read."""
    _, arguments = reduce_tensor(buffer)
    storage_handle, storage_size, storage_offset = arguments[7:10]
    place = storage_handle, storage_size, storage_offset, *arguments[11:15]
    return DeviceHandle(*[buffer.numel(), *place, gpu_of(buffer.device)])


def gpu_of(device: torch.device) -> str:
    """Return the UUID of a GPU, which is the same in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def open_shared(handle: DeviceHandle, device: torch.device) -> torch.Tensor:
    """Open a shared buffer without copying it.

    Args:
        device: this process's name for the same GPU.
    """
    flat = torch.Tensor, torch.Size([handle.num_bytes]), (1,), 0, torch.UntypedStorage, torch.uint8
    storage = handle.storage_handle, handle.storage_size_bytes, handle.storage_offset_bytes
    counter, event = (handle.ref_counter_handle, handle.ref_counter_offset), handle.event_handle
    is_synced = handle.event_sync_required
    index, gradient = device.index or 0, False
    buffer: torch.Tensor = rebuild_cuda_tensor(*flat, index, *storage, gradient, *counter, event, is_synced)
    return buffer
