"""Memory that runs out: for Ray's memory monitor, and for the kernel."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil

GROUPS = Path("/sys/fs/cgroup/memory")
LIMIT = 2**34


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
