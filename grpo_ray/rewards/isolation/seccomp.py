"""The filter of a worker's system calls: those that computing needs are allowed, all others fail with EPERM.

The kernel runs it before each call (https://docs.kernel.org/userspace-api/seccomp_filter.html). It denies what
Landlock leaves open: sockets, signals and limits of other processes, changes of a file's mode, owner or times,
memory of System V, new processes, and calls that a later kernel adds. A filter is a program of the classic BPF
machine: one register, jumps forward only.
"""

import ctypes
import errno
import fcntl
import os
import platform
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping

from grpo_ray.rewards.isolation.system_calls import NUMBERS, call, forgo_privileges

PR_SET_SECCOMP, MODE_FILTER = 22, 2
ALLOW, DENY = 0x7FFF0000, 0x00050000 | errno.EPERM
LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06  # of a word at an offset; jumps; the verdict
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data; six arguments of 64 bits follow

# Machine: its number for the kernel, and its column in NUMBERS. A 32-bit program's calls have another number.
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

INSTRUCTION_BYTES = 8
Instruction = tuple[int, int, int, int]  # operation, instructions to skip if true, and if false, operand
Program = list[Instruction]
"""Instructions that deny the call unless a condition holds, and else go on after the last one."""


def one_of(argument: int, values: tuple[int, ...]) -> Program:
    """Return the condition that the argument, a 32-bit number, is one of these."""
    tests = [(EQUAL, len(values) - index, 0, value) for index, value in enumerate(values)]
    return [_load(argument), *tests, _verdict(DENY)]


def without(argument: int, bits: int) -> Program:
    """Return the condition that the argument, a 32-bit number, has none of these bits."""
    return [_load(argument), (ANY_BIT, 0, 1, bits), _verdict(DENY)]


def null(argument: int) -> Program:
    """Return the condition that the argument is a null pointer."""
    words = (_load(argument, word) for word in (0, 1))
    return [step for load in words for step in (load, (EQUAL, 1, 0, 0), _verdict(DENY))]


def _load(argument: int, word: int = 0) -> Instruction:
    """Load half of an argument, the lower one by default; both machines have the lower one first."""
    return (LOAD, 0, 0, ARGUMENTS + 8 * argument + 4 * word)


def _verdict(action: int) -> Instruction:
    return (RETURN, 0, 0, action)


WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | (os.O_TMPFILE & ~os.O_DIRECTORY)
TERMINAL_ATTRIBUTES, NON_BLOCKING, CLOSE_ON_EXEC, KEEP_ON_EXEC = 0x5401, 0x5421, 0x5451, 0x5450
STREAMS = tuple(
    socket.SOCK_STREAM | flags
    for flags in (0, socket.SOCK_CLOEXEC, socket.SOCK_NONBLOCK, socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
)

COMMANDS = (fcntl.F_DUPFD, fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL, fcntl.F_SETFL, fcntl.F_DUPFD_CLOEXEC)
CONDITIONS: dict[str, Program] = {
    "open": without(1, WRITING),
    "openat": without(2, WRITING),
    "fcntl": one_of(1, COMMANDS),  # no locks, no leases, no signals, no larger pipes
    "ioctl": one_of(1, (TERMINAL_ATTRIBUTES, NON_BLOCKING, CLOSE_ON_EXEC, KEEP_ON_EXEC)),
    "sendto": null(4),  # only to the other end of a connected socket
    "socketpair": one_of(0, (socket.AF_UNIX,)) + one_of(1, STREAMS),  # for asyncio; it reaches no other process
}
ON_PROCESSES = {"kill": 0, "tkill": 0, "tgkill": 0, "prlimit64": 0}  # the argument that is a process


def is_filter_available() -> bool:
    """Return True if the kernel filters system calls, and the processor is one that NUMBERS knows."""
    if platform.machine() not in MACHINES or ctypes.sizeof(ctypes.c_void_p) != 8:
        return False
    try:
        call("prctl", PR_SET_SECCOMP, MODE_FILTER, None, 0, 0)
    except OSError as error:
        return error.errno == errno.EFAULT  # it would have read the filter
    raise AssertionError("the kernel took a filter at address 0")


class CallFilter:
    """The filter, made once but for the part that depends on the process that enters it."""

    def __init__(self, machine: str) -> None:
        architecture, column = MACHINES[machine]
        columns = {name: both[column] for name, both in NUMBERS.items()}
        self._numbers = {name: number for name, number in columns.items() if number is not None}
        checks = [
            (LOAD, 0, 0, ARCHITECTURE),
            (EQUAL, 1, 0, architecture),
            _verdict(DENY),  # a call of another ABI: its numbers mean something else
            (LOAD, 0, 0, NUMBER),
        ]
        common = {name: CONDITIONS.get(name, []) for name in self._numbers if name not in ON_PROCESSES}
        self._common = encoded([*checks, *self._cases(common)])

    def code(self, pid: int) -> bytes:
        """Return the whole filter for the process `pid`, which may signal and limit itself alone."""
        itself = {
            name: one_of(argument, (0, pid) if name == "prlimit64" else (pid,))
            for name, argument in ON_PROCESSES.items()
        }
        return self._common + encoded([*self._cases(itself), _verdict(DENY)])

    def enter(self) -> None:
        """Restrict this process, and those that it starts, for good.

        Raises:
            OSError: the kernel refuses.
        """
        code = self.code(os.getpid())
        forgo_privileges()
        program = _Program(len(code) // INSTRUCTION_BYTES, code)
        call("prctl", PR_SET_SECCOMP, MODE_FILTER, ctypes.byref(program), 0, 0)

    def _cases(self, conditions: Mapping[str, Program]) -> Iterator[Instruction]:
        for name, condition in conditions.items():
            body = [*condition, _verdict(ALLOW)]
            yield from [(EQUAL, 0, len(body), self._numbers[name]), *body]


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def encoded(program: Iterable[Instruction]) -> bytes:
    """Return the instructions as struct sock_filter."""
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)
