"""A process that cleans up after a killed driver which had started a local Ray.

Most of that Ray ends by itself; but Ray's agents wait a minute for a server that is gone, and an engine's
process could outlive its actor. The reaper holds a pipe from the driver, which closes however the driver dies,
and tracks every process that descended from it. A thread of a dead driver that waits in the kernel for a disk
keeps the pipe open, so the reaper looks at the driver as well.

A killed process also leaves its named semaphores in /dev/shm (vLLM's engine has one), because Ray kills the
tracker that Python keeps for them along with it. The reaper finds them by the processes that have them mapped.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

LOOK_S = 1.0
GRACE_S = 5.0
KILL_AFTER_S = 5.0  # Ray's own kill takes less

SHARED_MEMORY = Path("/dev/shm")
SEMAPHORE = "sem.mp-"  # the prefix that Python's multiprocessing gives them

Process = tuple[int, str]  # pid and start time: a pid alone may have been reused
Semaphore = tuple[Path, int]  # and its inode


def start_reaper() -> subprocess.Popen[bytes]:
    """Start a reaper that watches this process until `dismiss`, and wait until it does."""
    command, pipe = [sys.executable, "-I", "-S", __file__, str(os.getpid())], subprocess.PIPE
    reaper = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True, env={})
    assert reaper.stdout is not None
    reaper.stdout.read(1)
    return reaper


def dismiss(reaper: subprocess.Popen[bytes]) -> None:
    """End the reaper after the driver has cleaned up by itself."""
    with contextlib.suppress(BrokenPipeError):  # it has been killed
        reaper.communicate(b"done")


def _main(driver: int) -> None:
    ours: set[Process] = set()
    strangers: set[Semaphore] = set()
    semaphores: set[Semaphore] = set()
    print(end=".", flush=True)
    lives = True
    while lives:  # the last look, after its end, finds what was forked since the one before
        word = select.select([sys.stdin], [], [], LOOK_S)[0]
        lives = not word and process_at(driver) is not None
        entries = os.scandir(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else ()
        named = {(Path(entry), entry.inode()) for entry in entries if entry.name.startswith(SEMAPHORE)}
        ours = _alive(ours)
        ours |= _descendants([pid for pid, _ in ours] + [driver] * lives)
        semaphores |= _mapped(named - semaphores - strangers, ours)
        strangers |= named - semaphores
    if not word or not sys.stdin.buffer.read():  # a driver that was killed says nothing
        _end(ours)
    for path, _ in semaphores - _mapped(semaphores, _alive(ours)):
        path.unlink(missing_ok=True)


def _end(ours: set[Process]) -> None:
    deadline = time.monotonic() + GRACE_S
    while (ours := _alive(ours) | _descendants([pid for pid, _ in ours])) and time.monotonic() < deadline:
        time.sleep(0.2)
    for pid, _ in ours:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    while _alive(ours) and time.monotonic() < deadline + GRACE_S:
        time.sleep(0.05)


def _mapped(semaphores: set[Semaphore], processes: set[Process]) -> set[Semaphore]:
    """Return the semaphores that a process has mapped, by inode: they are created under another name."""
    if not semaphores:
        return set()
    inodes: set[int] = set()
    for pid, _ in processes:
        with contextlib.suppress(OSError):
            lines = Path("/proc", str(pid), "maps").read_text().splitlines()
            inodes |= {int(line.split()[4]) for line in lines if f" {SHARED_MEMORY}/sem." in line}
    return {semaphore for semaphore in semaphores if semaphore[1] in inodes}


def _descendants(ancestors: list[int]) -> set[Process]:
    """Return all descendants of the processes, without this one."""
    children: dict[int, list[Process]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        if stat := _stat(entry.name):
            parent, process = stat
            children.setdefault(parent, []).append(process)
    found: set[Process] = set()
    waiting = list(ancestors)
    while waiting:
        for process in children.get(waiting.pop(), []):
            if process[0] != os.getpid():
                found.add(process)
                waiting.append(process[0])
    return found


def _alive(processes: set[Process]) -> set[Process]:
    return {process for process in processes if process_at(process[0]) == process}


def process_at(pid: int) -> Process | None:
    """Return the process that has this pid, or None when it has ended."""
    stat = _stat(str(pid))
    return stat[1] if stat else None


def _stat(pid: str) -> tuple[int, Process] | None:
    """Return the process's parent and the process itself, or None when it has ended."""
    try:
        text = Path("/proc", pid, "stat").read_text()
    except OSError:
        return None
    state, parent, *rest = text[text.rindex(")") + 2 :].split()  # the name before it may contain anything
    return None if state == "Z" else (int(parent), (int(pid), rest[17]))


def kill_if_left(process: Process, after_s: float = KILL_AFTER_S) -> None:
    """Wait for a process to end, and kill it if it does not."""
    kill_at = time.monotonic() + after_s
    while process_at(process[0]) == process and time.monotonic() < kill_at:
        time.sleep(0.05)
    send_signal(process, signal.SIGKILL)


def send_signal(process: Process, number: int = signal.SIGUSR1) -> None:
    """Send a signal to a process, unless it has ended: its pid may be another process's by now."""
    pid, _ = process
    with contextlib.suppress(ProcessLookupError, PermissionError):
        descriptor = os.pidfd_open(pid)  # whatever the pid means later, the signal goes to this process
        try:
            if process_at(pid) == process:
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
