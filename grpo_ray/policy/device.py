"""The cores that a process runs on, and memory for copies on the host."""

import contextlib
import os
import weakref
from collections.abc import Sequence

import torch


def hold_to_cores(cores: Sequence[int] | None) -> None:
    """Pin all threads of this process (and those that they start) to the cores; None leaves them free."""
    if cores is not None:
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # the thread has ended meanwhile
                os.sched_setaffinity(int(thread), cores)


def host_memory(like: torch.Tensor) -> torch.Tensor:
    """Return an uninitialised tensor in host memory, page-locked if `like` is on a GPU.

    It is registered with CUDA after its allocation, because torch's own page-locked allocations are rounded up
    to a power of two. Where the system allows no more locked memory, it stays pageable.
    """
    memory = torch.empty(like.shape, dtype=like.dtype)
    if like.is_cuda and memory.numel():
        cuda, address = torch.cuda.cudart(), memory.data_ptr()
        if int(cuda.cudaHostRegister(address, memory.nbytes, 0)) == 0:
            weakref.finalize(memory, cuda.cudaHostUnregister, address)
    return memory
