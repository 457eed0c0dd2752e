"""One writer per run directory: a lock that the kernel holds, and releases however its process ends.

Some file systems have no such lock (Lustre without `-o flock`, some of FUSE). There a file that names the
writer takes its place: a process of this machine that has ended is recognised, one of another machine is not.
"""

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from grpo_ray.errors import RunError
from grpo_ray.telemetry.durable import replacing

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
    with ExitStack() as stack:
        try:  # a link could have any file of the user's emptied
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise RunError(
                f"{path} cannot be opened ({error.strerror}); remove it, or give another folder"
            ) from error
        _held[descriptor] = path
        stack.callback(_release, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _refusal(_holder(path), what, "") from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise RunError(f"{what} cannot be locked ({error.strerror}); give another folder") from error
            stack.enter_context(_named_writer(path.with_name(f"{path.name}.writer"), what))
        with suppress(OSError):  # on a full disk the lock holds all the same
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(_identity()).encode(), 0)
        yield


def check_still_held(path: Path, what: Path) -> None:
    """Notice a second writer, which file systems let in that lock for one machine only (`localflock`).

    Raises:
        RunError: this process holds the lock `path`, and another one as well.
    """
    holder = _holder(path) if path in _held.values() else {}
    if holder and holder != _identity():
        raise RunError(
            f"pid {holder.get('pid')} on host {holder.get('host')} writes to {what} as well, because the locks "
            "of its file system do not reach other machines (mount it with `-o flock`); end one of the two"
        )


def _release(descriptor: int) -> None:
    if _held.pop(descriptor, None) is not None:  # not in a forked child, where it is closed
        os.close(descriptor)


@contextmanager
def _named_writer(path: Path, what: Path) -> Iterator[None]:
    """Hold a file that names this process.

    Raises:
        RunError: the file names another process, which has not ended as far as this machine can tell.
    """
    own = _identity()
    try:
        with path.open("x") as file:
            file.write(json.dumps(own))
    except FileExistsError:
        _take_over(path, own, what)
    try:
        yield
    finally:
        if own["pid"] == os.getpid() and _holder(path) == own:
            path.unlink(missing_ok=True)


def _take_over(path: Path, own: dict[str, Any], what: Path) -> None:
    """Replace the file of a process that has ended; of several that try this, one succeeds.

    The file is never absent meanwhile: otherwise a process that has read it would not notice a third one.
    """
    holder = _holder(path)
    if not _has_ended(holder):
        raise _refusal(holder, what, f" (if it has ended, delete {path}: the file system has no locks)")
    with _named_writer(path.with_name(f"{path.name}.next"), what):
        if (now := _holder(path)) != holder:  # another process has done so already
            raise _refusal(now, what, "")
        with replacing(path) as partial:
            partial.write_text(json.dumps(own))


def _identity() -> dict[str, Any]:
    """Return what distinguishes this process from every other one, on any machine and at any time."""
    pid = os.getpid()
    return {"pid": pid, "host": socket.gethostname(), "machine": _machine(), "started": _started(pid)}


def _machine() -> str:
    """Return the boot of this machine, and the namespace that its pids are of."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _started(pid: int) -> int | None:
    """Return the start of a process in the kernel's clock ticks; None if there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def _has_ended(holder: dict[str, Any]) -> bool:
    """Return whether a process has certainly ended; false for one of another machine."""
    return holder.get("machine") == _machine() and holder.get("started") != _started(holder.get("pid", 0))


def _refusal(holder: dict[str, Any], what: Path, remedy: str) -> RunError:
    pid, host = holder.get("pid", "unknown"), holder.get("host", "unknown")
    return RunError(
        f"another process (pid {pid} on host {host}) writes to {what}; "
        f"wait until it has ended, or end it, and try again{remedy}"
    )


def _holder(path: Path) -> dict[str, Any]:
    """Return the identity in a file; empty if it is not written yet."""
    try:
        holder = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) else {}
