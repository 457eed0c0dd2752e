"""The cores that a process runs on, and memory for copies on the host."""

import contextlib
import mmap
import os
import weakref
from collections.abc import Sequence

import torch

MIN_LOCKED_BYTES = 2**20


def hold_to_cores(cores: Sequence[int] | None) -> None:
    """Pin all threads of this process (and those that they start) to the cores; None leaves them free."""
    if cores is not None:
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # the thread has ended meanwhile
                os.sched_setaffinity(int(thread), cores)


def host_memory(like: torch.Tensor) -> torch.Tensor:
    """Return an uninitialised tensor in host memory, page-locked if `like` is on a GPU.

    It is registered with CUDA after its allocation, because torch's own page-locked allocations are rounded up
    to a power of two. Where the system allows no more locked memory, it stays pageable; so do small tensors:
    pages are locked as a whole, and none may be locked twice.
    """
    if not like.is_cuda or like.nbytes < MIN_LOCKED_BYTES:
        return torch.empty(like.shape, dtype=like.dtype)
    num_bytes = -(-like.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = torch.empty(num_bytes + mmap.PAGESIZE, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % mmap.PAGESIZE :][:num_bytes]
    result = memory[: like.nbytes].view(like.dtype).view(like.shape)
    cuda, address = torch.cuda.cudart(), memory.data_ptr()
    if int(cuda.cudaHostRegister(address, num_bytes, 0)) == 0:
        weakref.finalize(result, cuda.cudaHostUnregister, address)
    else:
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=like.device)  # raises CUDA's last error, which would come up elsewhere
    return result
