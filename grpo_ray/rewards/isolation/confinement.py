"""The sandbox of grading workers: before its first answer, a worker gives up all that computing does not need.

Four layers: limits of memory, files and processes; root's capabilities; Landlock, for the files it may read
(landlock.py, readable.py); and a filter of system calls (seccomp.py). Linux only, as Ray's GPU nodes are.
Protection says what is not held where a kernel has only some of them.
"""

import ctypes
import os
import platform
import resource
import signal
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from grpo_ray.rewards.isolation.landlock import Ruleset, landlock_version
from grpo_ray.rewards.isolation.seccomp import CallFilter, is_filter_available
from grpo_ray.rewards.isolation.system_calls import call

PR_SET_PDEATHSIG = 1
CAPABILITY_VERSION = 0x20080522
CAP_DAC_READ_SEARCH = 1 << 2
MAX_FILES = 256  # open at once: pipes and sockets hold memory that no limit of memory counts
TRUNCATES, CONNECTS, SIGNALS = 3, 4, 6  # versions of Landlock from which it denies them


@dataclass(frozen=True)
class Protection:
    """The kernel's parts that the sandbox uses: a version of Landlock (0: none), filters of system calls."""

    landlock: int
    has_filter: bool

    @property
    def gaps(self) -> tuple[str, ...]:
        """Abilities that code in a worker has although docs/threats.md denies them."""
        gaps = []
        if not self.landlock:
            gaps.append("read every file, and the memory and environment of processes, of this user")
        if self.has_filter:
            return tuple(gaps)
        if not self.landlock:
            gaps.append("remove and make files, execute programs")
        if self.landlock < TRUNCATES:
            gaps.append("truncate files")
        if self.landlock < CONNECTS:
            gaps.append("open TCP connections")
        if self.landlock < SIGNALS:
            gaps.append("signal processes")
        gaps.append("use sockets of other kinds, lock files, change their modes and other processes' limits")
        return tuple(gaps)

    @property
    def notices(self) -> tuple[str, ...]:
        """One line that states the gaps; none if there are none."""
        if not self.gaps:
            return ()
        landlock = f"Landlock {self.landlock}" if self.landlock else "no Landlock"
        calls = "a filter of system calls" if self.has_filter else "no filter of system calls"
        return (
            f"grading is less isolated on this machine ({landlock}, {calls}): code that an answer gets run in "
            f"a grading process could {'; '.join(self.gaps)} (docs/threats.md)",
        )


@lru_cache
def protection_here() -> Protection:
    """Return this machine's level."""
    return Protection(landlock_version(), is_filter_available())


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Receive this signal as soon as the process `parent`, which started this one, ends."""
    call("prctl", PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:  # it was gone before the line above
        sys.exit("the parent process is gone")


class Confinement:
    """The sandbox of a fork server's workers, prepared once, after all imports."""

    def __init__(
        self, memory_gib: float, readable: Iterable[str] = (), protection: Protection | None = None,
        is_offline: bool = True,
    ) -> None:  # fmt: skip
        """
        Args:
            readable: files and folders that workers may read besides what their modules need.
            protection: the parts of the kernel to use; default: all that it has.
            is_offline: deny the network and threads, and all system calls that computing does not need.

        Raises:
            ValueError, OSError: as `Ruleset`.
        """
        self.memory_gib, self._is_offline = memory_gib, is_offline
        protection = protection or protection_here()
        self._filter = CallFilter(platform.machine()) if protection.has_filter and is_offline else None
        version = protection.landlock
        self._ruleset = Ruleset(readable, version, is_offline) if version else None

    def enter(self) -> None:
        """Confine this process for good: limit resources, drop capabilities, and enter the sandbox.

        Raises:
            OSError: the system refuses one of them.
        """
        limit_resources(self.memory_gib, self._is_offline)
        drop_capabilities()
        if self._ruleset is not None:
            self._ruleset.enter()
        if self._filter is not None:
            self._filter.enter()


def limit_resources(memory_gib: float, is_offline: bool = True) -> None:
    """Allow `memory_gib` beyond the memory in use now, but no written file, core dump or new process.

    A worker with the network starts threads, which count as processes, and each maps a stack.
    """
    limits = {
        resource.RLIMIT_AS: MappedMemory().num_bytes() + int(memory_gib * 2**30),
        resource.RLIMIT_NOFILE: MAX_FILES,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,
    }
    if not is_offline:
        del limits[resource.RLIMIT_NPROC]
    for limit, value in limits.items():
        _, most = resource.getrlimit(limit)  # which only root may raise
        least = value if most < 0 else min(value, most)
        resource.setrlimit(limit, (least, least))
    sys.dont_write_bytecode = True


def drop_capabilities() -> None:
    """Drop root's capabilities except reading any file, which is kept in case another user owns the libraries.

    With the others, the process could read the memory of any process despite the sandbox.
    """
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    words = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice 32 bits
    call("capget", header, words)
    kept = words[1] & CAP_DAC_READ_SEARCH
    call("capset", header, (ctypes.c_uint32 * 6)(kept, kept))


class MappedMemory:
    """The memory that this process has mapped, libraries included, as RLIMIT_AS counts it."""

    def __init__(self) -> None:
        self._fd = os.open("/proc/self/statm", os.O_RDONLY)  # stays open: it is read after every answer

    def num_bytes(self) -> int:
        return int(os.pread(self._fd, 32, 0).split()[0]) * resource.getpagesize()
