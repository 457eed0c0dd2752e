"""Locks that the kernel holds, and releases however their process ends: of a run, and of temporary folders.

Unlike a pid, a lock is also seen from another container that shares the folder's file system.
"""

import errno
import fcntl
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from grpo_ray.errors import RunError

NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK)
_held: dict[int, Path] = {}  # this process's locks, by descriptor


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
        RunError: another process holds it, or the file is a link or cannot be opened.
    """
    try:  # a link could have any file of the user's emptied
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}; make its folder writable, or remove it") from error
    _held[descriptor] = path
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = {"pid": "unknown", "host": "unknown", **_holder(path)}
            raise RunError(
                f"another process (pid {holder['pid']} on host {holder['host']}) writes to {what}; "
                "wait until it has ended, or end it, and try again"
            ) from None
        except OSError as error:
            remedy = "give another folder"
            if error.errno in NO_LOCKS:  # Lustre, some of FUSE
                remedy = "its file system has no locks: mount it with `-o flock`, or give a folder elsewhere"
            raise RunError(f"{what} cannot be locked ({error.strerror}); {remedy}") from error
        with suppress(OSError):  # on a full disk the lock holds all the same
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(_identity()).encode(), 0)
        yield
    finally:
        if _held.pop(descriptor, None) is not None:  # not in a forked child, where it is closed
            os.close(descriptor)


def check_still_held(path: Path, what: Path) -> None:
    """Notice a second writer: in the place of a folder that was moved, or let in (`localflock`).

    Raises:
        RunError: this process holds the lock `path`, and another one as well.
    """
    descriptor = next((number for number, held in _held.items() if held == path), None)
    if descriptor is None or (holder := _holder(path)) in ({}, _identity()):
        return
    other = f"pid {holder.get('pid')} on host {holder.get('host')}"
    if not os.path.samestat(os.fstat(descriptor), path.stat()):
        raise RunError(f"{what} was moved or removed while this run wrote to it; {other} writes to a new one")
    raise RunError(
        f"{other} also writes to {what}, because the locks of its file system do not reach other machines "
        "(mount it with `-o flock`); end one of the two"
    )


def is_taken_since(path: Path, time: float) -> bool:
    """Return True if a process of this machine, which is alive, took the lock `path` after `time`."""
    holder = _holder(path)
    if holder.get("machine") != _identity()["machine"] or path.stat().st_mtime <= time:
        return False
    return Path(f"/proc/{holder['pid']}").exists()


def _identity() -> dict[str, Any]:
    """Return what distinguishes this process from every other one that runs, on any machine."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    machine = f"{boot} {os.readlink('/proc/self/ns/pid')}"  # and the namespace that its pids are of
    return {"pid": os.getpid(), "host": socket.gethostname(), "machine": machine}


def _holder(path: Path) -> dict[str, Any]:
    """Return the identity in a file; empty if it is not written yet."""
    try:
        holder = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) else {}


def make_locked(prefix: str, parent: str) -> tuple[str, int]:
    """Make a folder in `parent`, and remove those of killed processes; return it, and the file that locks."""
    remove_abandoned(prefix, parent)
    while True:
        folder = tempfile.mkdtemp(prefix=prefix, dir=parent)
        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.path.exists(folder):  # or else another process removed it before it was locked
            return folder, descriptor
        os.close(descriptor)


def remove_abandoned(prefix: str, parent: str) -> None:
    """Remove this user's folders with that prefix in `parent` that no living process has locked."""
    for folder in Path(parent).glob(f"{prefix}*"):
        with suppress(OSError):  # it is locked, no folder, or another process was faster
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_uid == os.getuid():
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
