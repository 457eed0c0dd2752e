"""The sandbox of grading workers, in raw system calls: no reader of GRPO needs this file.

Before it reads a policy's first answer, a worker permanently gives up further memory, files, processes, network
and privileges. Linux only, as Ray's GPU nodes are. Landlock is the kernel's sandbox for unprivileged processes
(Linux 5.13; https://docs.kernel.org/userspace-api/landlock.html); where it is missing, only the limits apply.
"""

import ctypes
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
LANDLOCK_CREATE_RULESET, LANDLOCK_RESTRICT_SELF = 444, 446  # the same on every architecture
LANDLOCK_CREATE_RULESET_VERSION = 1

READ_FILE, READ_DIR = 1 << 2, 1 << 3
NUM_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # by the kernel's Landlock version; 16 from the fifth on
NETWORK_RIGHTS = 0b11  # TCP: bind, connect; from version 4
SCOPES = 0b11  # abstract unix sockets, signals to processes outside; from version 6

CAPABILITY_VERSION = 0x20080522
CAP_DAC_READ_SEARCH = 1 << 2

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Receive this signal as soon as the process `parent`, which started this one, ends."""
    _prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it was gone before the line above
        sys.exit("the parent process is gone")


def confine(memory_gib: float) -> None:
    """Limit resources, drop capabilities and enter the sandbox.

    Raises:
        OSError: the system refuses one of them.
    """
    limit_resources(memory_gib)
    drop_capabilities()
    enter_sandbox()


def limit_resources(memory_gib: float) -> None:
    """Allow `memory_gib` beyond the memory in use now, but no written file, core dump or new process."""
    limits = {
        resource.RLIMIT_AS: MappedMemory().num_bytes() + int(memory_gib * 2**30),
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    sys.dont_write_bytecode = True


def drop_capabilities() -> None:
    """Drop root's capabilities except reading any file, which is kept in case another user owns the libraries.

    With the others, the process could read the memory of any process despite the sandbox.
    """
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    words = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice 32 bits
    _check(_libc.capget(header, words), "capget")
    kept = words[1] & CAP_DAC_READ_SEARCH
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)(kept, kept)), "capset")


def enter_sandbox() -> bool:
    """Restrict this process to reading files; return False if the kernel has no Landlock.

    It can write, remove, make or execute nothing, and open no TCP connection. It can neither signal nor inspect
    processes outside: their /proc/PID/environ, which holds Ray's token, is closed.
    """
    version = _libc.syscall(LANDLOCK_CREATE_RULESET, None, 0, LANDLOCK_CREATE_RULESET_VERSION)
    if version < 1:
        return False
    rights = (1 << NUM_FILE_RIGHTS.get(version, 16)) - 1
    handled = [rights & ~(READ_FILE | READ_DIR)]  # a handled right is denied: no rule allows it
    handled += [NETWORK_RIGHTS] * (version >= 4) + [SCOPES] * (version >= 6)
    attributes = (ctypes.c_uint64 * len(handled))(*handled)
    ruleset = _libc.syscall(LANDLOCK_CREATE_RULESET, attributes, ctypes.sizeof(attributes), 0)
    _check(min(ruleset, 0), "landlock_create_ruleset")
    _prctl(PR_SET_NO_NEW_PRIVS, 1)  # required of a process without privileges
    _check(_libc.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)
    return True


class MappedMemory:
    """The memory that this process has mapped, libraries included, as RLIMIT_AS counts it."""

    def __init__(self) -> None:
        self._fd = os.open("/proc/self/statm", os.O_RDONLY)  # stays open: it is read after every answer

    def num_bytes(self) -> int:
        return int(os.pread(self._fd, 32, 0).split()[0]) * resource.getpagesize()


def _prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, value, 0, 0, 0), f"prctl({option})")


def _check(status: int, call: str) -> None:
    if status:
        raise OSError(ctypes.get_errno(), call)
