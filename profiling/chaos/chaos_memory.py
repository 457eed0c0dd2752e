"""Memory that runs out: for Ray's memory monitor, for the kernel, and in /dev/shm."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
from chaos_disk import fill

GROUPS = Path("/sys/fs/cgroup/memory")
LIMIT = 2**34
SHARED, SHARED_SIZE = Path("/dev/shm"), "6g"


class Memory:
    """A memory limit that Ray's monitor reads and believes: no memory is used to make it act.

    The files of the machine's own memory group are replaced in this process's mount namespace, so only for the
    run. Ray takes the smaller limit, of the machine and of the group.
    """

    def __init__(self, folder: Path) -> None:
        self._usage = folder / "memory.usage"
        self.use(0.2)
        (folder / "memory.limit").write_text(f"{LIMIT}\n")
        (folder / "memory.stat").write_text("total_inactive_file 0\ntotal_active_file 0\n")
        for name in ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"):
            shown = folder / name.partition("_in_bytes")[0]
            subprocess.run(["mount", "--bind", str(shown), str(GROUPS / name)], check=True, capture_output=True)

    @staticmethod
    def is_possible() -> bool:
        return (GROUPS / "memory.limit_in_bytes").exists()

    def use(self, share: float) -> None:
        """Show this share of the limit as used."""
        self._usage.write_text(f"{int(share * LIMIT)}\n")


def own_shared_memory() -> None:
    """Mount a /dev/shm for the run alone, in this process's mount namespace."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={SHARED_SIZE},mode=1777", "chaos", str(SHARED)]
    subprocess.run(command, check=True, capture_output=True)


@contextlib.contextmanager
def full_shared_memory() -> Iterator[None]:
    """Leave not one free page in /dev/shm."""
    filler = SHARED / "chaos-filler"
    try:
        fill(filler)
        yield
    finally:
        filler.unlink(missing_ok=True)


@contextlib.contextmanager
def out_of_memory(process: psutil.Process) -> Iterator[None]:
    """Let the kernel kill the process as soon as it needs another page."""
    group = GROUPS / f"chaos-{os.getpid()}"
    group.mkdir(exist_ok=True)
    try:
        (group / "memory.limit_in_bytes").write_text("65536")
        (group / "cgroup.procs").write_text(str(process.pid))
        yield
    finally:
        with contextlib.suppress(OSError):  # it still holds a process
            group.rmdir()
