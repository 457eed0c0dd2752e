"""Ends what a killed driver leaves of the Ray that it started on this machine.

Most of it ends by itself; Ray's agents wait a minute for a server that is gone, and an engine's process could
outlive its actor. A process of its own holds a pipe from the driver: it closes however the driver dies.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

GRACE_S = 5.0


def start_reaper(raylet_pid: int) -> subprocess.Popen[bytes]:
    """Watch this process; closing the returned process's stdin says that nothing is left."""
    command = [sys.executable, "-S", __file__, str(raylet_pid)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def members(raylet_pid: int) -> list[int]:
    """Every process that this raylet started, or that one of those did: they inherit its pid by name."""
    mark = f"RAY_RAYLET_PID={raylet_pid}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended, or is another user's
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return found


def _main(raylet_pid: int) -> None:
    sys.stdin.buffer.read()  # until the driver is gone
    deadline = time.monotonic() + GRACE_S
    while members(raylet_pid) and time.monotonic() < deadline:
        time.sleep(0.2)
    for pid in members(raylet_pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
