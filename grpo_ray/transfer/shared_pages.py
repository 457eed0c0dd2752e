"""Bytes that one process of a node holds and others map, without a copy where the pages are shared already.

A snapshot that Ray brought to a node lies once in its object store, whatever the number of processes that hold
it. vLLM's workers are no workers of Ray's; they open the store's memory through a process that has it open.
"""

import contextlib
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from grpo_ray.transfer.kept_weights import KeptWeights
from grpo_ray.transfer.messages import WeightSnapshot


@dataclass(frozen=True)
class Pages:
    """A range of a file, or of memory that /proc shows as one."""

    path: str
    offset_bytes: int
    num_bytes: int


def map_pages(pages: Pages, is_shared: bool = False) -> torch.Tensor:
    """Return the bytes as a flat uint8 tensor; unless shared, what is written to it stays in this process.

    A shared one has what either process writes later, as page-locked memory must. Otherwise the process that
    gave the pages keeps the bytes as they are for as long as the tensor is read.

    Raises:
        OSError: the pages cannot be opened.
    """
    beyond = pages.offset_bytes % mmap.ALLOCATIONGRANULARITY
    if not pages.num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    flags = mmap.MAP_SHARED if is_shared else mmap.MAP_PRIVATE
    with open(pages.path, "r+b" if is_shared else "rb") as file:
        size, offset = beyond + pages.num_bytes, pages.offset_bytes - beyond
        mapped = mmap.mmap(file.fileno(), size, flags, mmap.PROT_READ | mmap.PROT_WRITE, offset=offset)
    return torch.frombuffer(mapped, dtype=torch.uint8)[beyond:]


def pages_of(data: np.ndarray) -> Pages | None:
    """Return the shared pages that an array (contiguous) lies in, or None if other processes cannot open them.

    The caller keeps the array while the pages may be read.
    """
    address = data.__array_interface__["data"][0]
    for start, end, offset, device, inode in _shared_mappings():
        if start <= address and address + data.nbytes <= end:
            path = _path_of(device, inode)
            return None if path is None else Pages(path, offset + address - start, data.nbytes)
    return None


def _shared_mappings() -> Iterator[tuple[int, int, int, int, int]]:
    """Yield start, end, offset in the file, device and inode of each mapping that is shared."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, mode, offset, device, inode = line.split()[:5]
        if mode.endswith("s") and inode != "0":
            start, end = (int(address, 16) for address in addresses.split("-"))
            major, minor = (int(number, 16) for number in device.split(":"))
            yield start, end, int(offset, 16), os.makedev(major, minor), int(inode)


def _path_of(device: int, inode: int) -> str | None:
    """Return the path of a file that this process or its parent has open.

    The parent of a worker of Ray's is the raylet, which made the store's memory; its file has no name any more.
    """
    for process in (os.getpid(), os.getppid()):
        with contextlib.suppress(OSError):  # of another user
            for path in Path(f"/proc/{process}/fd").iterdir():
                with contextlib.suppress(OSError):  # closed meanwhile
                    found = path.stat()
                    if (found.st_dev, found.st_ino) == (device, inode):
                        return str(path)
    return None


def shared_memory(fd: int, num_bytes: int) -> np.ndarray:
    """Give a file this size, and return its bytes, mapped: uint8 `[num_bytes]`, more than none."""
    os.ftruncate(fd, num_bytes)
    return np.frombuffer(mmap.mmap(fd, num_bytes), np.uint8)


class SharedBuffer:
    """Anonymous shared memory that other processes of the same user can map through /proc.

    It has no name in /dev/shm, so it cannot outlive the process that made it, however that process dies.
    """

    def __init__(self, fd: int | None = None) -> None:
        """Make new memory, or use that of the open file `fd`, which `close` closes."""
        self._fd = os.memfd_create("grpo_ray-weights") if fd is None else fd
        self._kept: KeptWeights | None = KeptWeights(partial(shared_memory, self._fd))

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def write(self, snapshot: WeightSnapshot) -> Pages:
        """Copy the snapshot's bytes into the memory, or those that changed; the next snapshot reuses it.

        Raises:
            ValueError: the change is one of another version than the memory's.
        """
        assert self._kept is not None, "closed"
        return Pages(self.path, 0, self._kept.receive(snapshot).nbytes)

    def close(self) -> None:
        self._kept = None  # and with it the mapping
        os.close(self._fd)
