"""The cores that a process runs on, and host memory: for copies, and for what leaves a GPU once per step."""

import contextlib
import mmap
import os
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch.utils.weak import WeakTensorKeyDictionary

MIN_LOCKED_BYTES = 2**20
PLAIN = (torch.Tensor, torch.nn.Parameter)  # sharded and 4-bit tensors move by themselves


def hold_to_cores(cores: Sequence[int] | None) -> None:
    """Pin all threads of this process (and those that they start) to the cores; None leaves them free."""
    if cores is not None:
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # the thread has ended meanwhile
                os.sched_setaffinity(int(thread), cores)


def host_memory(like: torch.Tensor) -> torch.Tensor:
    """Return an uninitialised tensor in host memory, page-locked if `like` is on a GPU; see `lock_pages`."""
    if not like.is_cuda:
        return torch.empty(like.shape, dtype=like.dtype)
    return lock_pages(whole_pages(like.nbytes).view(like.dtype).view(like.shape))


def whole_pages(num_bytes: int) -> torch.Tensor:
    """Return uninitialised bytes, uint8, that begin a page of memory and share none with other data."""
    memory = torch.empty(_rounded(num_bytes) + mmap.PAGESIZE, dtype=torch.uint8)
    return memory[-memory.data_ptr() % mmap.PAGESIZE :][:num_bytes]


def lock_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Page-lock a tensor of `whole_pages` for as long as this object lives, and return it.

    torch's own page-locked allocations are rounded up to a power of two. Where the system allows no more locked
    memory, it stays pageable; so do small tensors.
    """
    if tensor.nbytes < MIN_LOCKED_BYTES:
        return tensor
    cuda, address = torch.cuda.cudart(), tensor.data_ptr()
    if int(cuda.cudaHostRegister(address, _rounded(tensor.nbytes), 0)) == 0:
        weakref.finalize(tensor, cuda.cudaHostUnregister, address)
    else:
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")  # raises CUDA's last error, which would come up elsewhere
    return tensor


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class Offload:
    """Page-locked host memory for each tensor, kept from step to step: locking it takes longer than a copy."""

    def __init__(self) -> None:
        self._memory = WeakTensorKeyDictionary()  # moving replaces a tensor's data, not the tensor

    @torch.no_grad()
    def move(self, tensors: Iterable[torch.Tensor], device: torch.device, are_constant: bool = False) -> None:
        """Move the data of plain tensors in place, with all copies under way at the same time.

        Args:
            are_constant: the tensors never change, so that one copy on the host is enough.
        """
        for tensor in tensors:
            if type(tensor) not in PLAIN:
                continue
            if device.type == "cpu":
                tensor.data = self._on_host(tensor, are_constant)
            else:
                tensor.data = tensor.data.to(device, non_blocking=True)
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()

    def _on_host(self, tensor: torch.Tensor, is_constant: bool) -> torch.Tensor:
        memory: torch.Tensor | None = self._memory.get(tensor)
        if memory is None:
            memory = self._memory[tensor] = host_memory(tensor)
        elif is_constant:
            return memory
        return memory.copy_(tensor, non_blocking=True)
