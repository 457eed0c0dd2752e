"""The filter of system calls as a program, run by a machine of a few lines: also for another processor."""

import errno
import os
import re
import socket
import struct
from functools import cache
from pathlib import Path

import pytest

from grpo_ray.rewards.isolation.seccomp import ALLOW, MACHINES, CallFilter
from grpo_ray.rewards.isolation.system_calls import NUMBERS

PID = 4711
DENIED = 0x00050000 | errno.EPERM
OTHER_ABI = 0x40000003  # i386
HEADERS = {
    "x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h",
    "aarch64": "/usr/include/asm-generic/unistd.h",  # the numbers of all newer architectures
}
HEADER_NAMES = {"newfstatat": "3264_fstatat"}
# Calls that change or reach something outside of the process, which a longer list must not let in.
REACHING = """
accept add_key bind bpf chown chroot clock_settime clone clone3 connect creat execve execveat fallocate
fanotify_init fchmod fchmodat fchmodat2 fchown fchownat finit_module flock fork fsetxattr ftruncate
init_module inotify_init1 io_uring_setup ioprio_set iopl kexec_load keyctl landlock_create_ruleset link
linkat listen memfd_create memfd_secret mkdir mkdirat mknod mknodat mount move_mount mq_open msgget
name_to_handle_at open_by_handle_at open_tree openat2 perf_event_open personality pidfd_getfd pidfd_open
pidfd_send_signal prctl process_vm_readv process_vm_writev ptrace reboot removexattr rename renameat
renameat2 request_key rmdir rt_sigqueueinfo rt_tgsigqueueinfo sched_setaffinity sched_setattr
sched_setscheduler seccomp semget sendmmsg sendmsg setgid setns setpriority setresuid setuid setxattr shmget
socket symlink symlinkat syslog truncate unlink unlinkat unshare userfaultfd utimensat vfork
"""


@cache
def program_for(machine: str) -> list[tuple[int, ...]]:
    code = CallFilter(machine).code(PID)
    return [struct.unpack_from("<HBBI", code, offset) for offset in range(0, len(code), 8)]


def verdict(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """Run the filter as the kernel does, on struct seccomp_data."""
    program = program_for(machine)
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("<IIQ6Q", number, architecture or MACHINES[machine][0], 0, *padded)
    place, register = 0, 0
    while True:
        operation, if_true, if_false, operand = program[place]
        place += 1
        if operation == 0x20:
            (register,) = struct.unpack_from("<I", data, operand)
        elif operation == 0x15:
            place += if_true if register == operand else if_false
        elif operation == 0x45:
            place += if_true if register & operand else if_false
        else:
            assert operation == 0x06
            return operand


def is_allowed(machine: str, name: str, *arguments: int) -> bool:
    return verdict(machine, NUMBERS[name][MACHINES[machine][1]], *arguments) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
def test_only_calls_of_the_list_are_allowed(machine: str) -> None:
    column = MACHINES[machine][1]
    listed = {both[column] for both in NUMBERS.values()}
    for number in range(600):
        if number not in listed:
            assert verdict(machine, number) == DENIED, number
    for name in ("read", "mmap", "futex", "exit_group", "recvfrom", "rt_sigreturn"):
        assert is_allowed(machine, name)
    assert verdict(machine, 0x40000000 + 39) == DENIED  # x32
    assert verdict(machine, 1, architecture=OTHER_ABI) == DENIED
    assert verdict(machine, 63, architecture=MACHINES["x86_64" if column else "aarch64"][0]) == DENIED


def test_no_call_that_reaches_outside_of_the_process_is_listed() -> None:
    assert set(REACHING.split()) & NUMBERS.keys() == set()


@pytest.mark.parametrize("machine", MACHINES)
def test_conditions_on_arguments(machine: str) -> None:
    here, high = -100 & 0xFFFFFFFF, 1 << 40

    def allows(name: str, *arguments: int) -> bool:
        return is_allowed(machine, name, *arguments)

    assert allows("openat", here, 1, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    for flag in (os.O_WRONLY, os.O_RDWR, os.O_CREAT, os.O_TRUNC, os.O_APPEND, os.O_TMPFILE | os.O_RDWR):
        assert not allows("openat", here, 1, flag)
    assert allows("sendto", 3, 1, 1, 0, 0)
    assert not allows("sendto", 3, 1, 1, 0, 8)
    assert not allows("sendto", 3, 1, 1, 0, high)
    assert allows("prlimit64", 0)
    assert allows("prlimit64", PID)
    assert not allows("prlimit64", 1)
    for name in ("kill", "tkill", "tgkill"):
        assert allows(name, PID)
        for other in (0, 1, -1 & 0xFFFFFFFF, PID + 1):
            assert not allows(name, other)
    assert allows("socketpair", socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    assert not allows("socketpair", socket.AF_UNIX, socket.SOCK_DGRAM)
    assert not allows("socketpair", socket.AF_INET, socket.SOCK_STREAM)
    assert [command for command in range(2000) if allows("fcntl", 3, command)] == [0, 1, 2, 3, 4, 1030]
    assert not allows("ioctl", 3, 0x40086602)


def test_old_calls_that_open_a_file() -> None:
    assert is_allowed("x86_64", "open", 1, os.O_RDONLY)
    assert not is_allowed("x86_64", "open", 1, os.O_WRONLY)


@pytest.mark.parametrize("machine", MACHINES)
def test_numbers_are_those_of_the_kernels_headers(machine: str) -> None:
    header = Path(HEADERS[machine])
    if not header.exists():
        pytest.skip("the kernel's headers are not installed")
    defined = dict(re.findall(r"^#define __NR_?(\w+)\s+(\d+)", header.read_text(), re.MULTILINE))
    for name, both in NUMBERS.items():
        number = both[MACHINES[machine][1]]
        found = defined.get(name) or defined.get(f"3264_{name}") or defined.get(HEADER_NAMES.get(name, ""))
        assert number == (int(found) if found is not None else None), name
