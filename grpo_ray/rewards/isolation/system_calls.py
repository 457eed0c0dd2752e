"""The system calls that a grading worker may make, with their numbers, and raw calls that Python lacks.

seccomp.py refuses all others, and restricts some by their arguments. Numbers: x86_64, aarch64 (None: missing).
"""

import ctypes
import os
from typing import Any

# fmt: off
NUMBERS: dict[str, tuple[int, int | None]] = {
    # files that are open
    "read": (0, 63), "readv": (19, 65), "pread64": (17, 67), "preadv": (295, 69), "preadv2": (327, 286),
    "write": (1, 64), "writev": (20, 66), "close": (3, 57), "close_range": (436, 436), "lseek": (8, 62),
    # finding and opening files to read
    "open": (2, None), "openat": (257, 56), "stat": (4, None), "fstat": (5, 80), "lstat": (6, None),
    "newfstatat": (262, 79), "statx": (332, 291), "statfs": (137, 43), "fstatfs": (138, 44),
    "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439), "readlink": (89, None),
    "readlinkat": (267, 78), "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50),
    "getdents": (78, None), "getdents64": (217, 61), "fadvise64": (221, 223), "readahead": (187, 213),
    # memory
    "mmap": (9, 222), "munmap": (11, 215), "mprotect": (10, 226), "mremap": (25, 216), "madvise": (28, 233),
    "brk": (12, 214), "membarrier": (324, 283),
    # descriptors
    "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "pipe": (22, None), "pipe2": (293, 59),
    "eventfd2": (290, 19), "fcntl": (72, 25), "ioctl": (16, 29), "poll": (7, None), "ppoll": (271, 73),
    "select": (23, None), "pselect6": (270, 72), "epoll_create1": (291, 20), "epoll_ctl": (233, 21),
    "epoll_wait": (232, None), "epoll_pwait": (281, 22), "epoll_pwait2": (441, 441),
    # the channel to the pool
    "recvfrom": (45, 207), "sendto": (44, 206), "socketpair": (53, 199),
    # threads and scheduling, of itself
    "futex": (202, 98), "futex_waitv": (449, 449), "set_robust_list": (273, 99),
    "get_robust_list": (274, 100), "rseq": (334, 293), "set_tid_address": (218, 96),
    "arch_prctl": (158, None), "sched_yield": (24, 124), "sched_getaffinity": (204, 123),
    "sched_getparam": (143, 121), "sched_getscheduler": (145, 120), "getcpu": (309, 168),
    "get_mempolicy": (239, 236),
    # signals, of itself
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136), "rt_sigsuspend": (130, 133), "rt_sigtimedwait": (128, 137),
    "sigaltstack": (131, 132), "pause": (34, None), "alarm": (37, None), "setitimer": (38, 103),
    "getitimer": (36, 102), "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131),
    "restart_syscall": (219, 128),
    # time
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115),
    "nanosleep": (35, 101), "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153),
    "getrusage": (98, 165),
    # facts about itself
    "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178), "getpgrp": (111, None),
    "getpgid": (121, 155), "getsid": (124, 156), "getuid": (102, 174), "geteuid": (107, 175),
    "getgid": (104, 176), "getegid": (108, 177), "getresuid": (118, 148), "getresgid": (120, 150),
    "getgroups": (115, 158), "getpriority": (140, 141), "capget": (125, 90),
    # limits and the end
    "getrlimit": (97, 163), "setrlimit": (160, 164), "prlimit64": (302, 261), "umask": (95, 166),
    "uname": (63, 160), "sysinfo": (99, 179), "getrandom": (318, 278), "exit": (60, 93),
    "exit_group": (231, 94),
}
# fmt: on

PR_SET_NO_NEW_PRIVS = 38

_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> int:
    """Call a function of the C library and return its result.

    Raises:
        OSError: it returned -1.
    """
    result: int = getattr(_libc, name)(*arguments)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{arguments}: {os.strerror(number)}")
    return result


def forgo_privileges() -> None:
    """Gain no privilege by executing a program, which the kernel demands before a process restricts itself."""
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
