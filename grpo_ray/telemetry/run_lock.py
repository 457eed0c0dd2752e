"""One writer per run directory: a lock that the kernel holds, and releases however its process ends."""

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from grpo_ray.errors import RunError

_held: set[int] = set()  # descriptors of this process's locks


def _close_in_child() -> None:
    """Close the locks in a forked child, which would otherwise keep holding its parent's."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def locked(path: Path, what: Path) -> Iterator[None]:
    """Hold the lock file `path`, which names its holder; errors name `what` it protects.

    Raises:
        RunError: another process holds it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    _held.add(descriptor)
    try:
        _lock(descriptor, path, what)
        yield
    finally:
        _held.discard(descriptor)
        os.close(descriptor)


def _lock(descriptor: int, path: Path, what: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid, host = _holder(path)
        raise RunError(
            f"another process (pid {pid} on host {host}) writes to {what}; "
            "wait until it has ended, or end it, and try again"
        ) from None
    with suppress(OSError):  # on a full disk the lock holds all the same
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)


def _holder(path: Path) -> tuple[str, str]:
    try:
        holder = json.loads(path.read_text())
        return str(holder["pid"]), str(holder["host"])
    except (OSError, ValueError, KeyError, TypeError):  # the holder has not written it yet
        return "unknown", "unknown"
