"""Attempts of code that an answer got run in a grading worker; test_reward_sandbox.py expects each to fail.

There is one for each way in which a call is denied; test_reward_sandbox.py names the calls that no list
may let in.

    python tests/sandbox_attempts.py FOLDER    prints {case: {promise: {attempt: outcome}}} as JSON

Every attempt is made in a child of its own, as a case's user and at its level of protection, against victims
outside. An outcome is `done`, or the name of the error. The case `free` has no sandbox.
"""

import ctypes
import errno
import fcntl
import json
import os
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_ray.rewards.isolation.confinement import Confinement, Protection, die_with_parent, protection_here

NOBODY = 65534
MEMORY_GIB = 0.5
Attempts = dict[str, dict[str, Callable[[], Any]]]
libc = ctypes.CDLL(None, use_errno=True)


def system(number: int, *arguments: Any) -> int:
    result: int = libc.syscall(number, *arguments)
    if result == -1:
        raise OSError(ctypes.get_errno(), f"system call {number}")
    return result


class Victims:
    """Things outside the worker that belong to the same user."""

    def __init__(self, folder: Path, uid: int) -> None:
        self.folder = folder / str(uid)
        self.folder.mkdir(mode=0o700)
        self.file, self.secret = self.folder / "file", self.folder / "home" / ".ray" / "auth_token"
        self.leased = self.folder / "leased"
        for path in (self.file, self.leased):
            path.write_text("kept")
        self.secret.parent.mkdir(parents=True)
        self.secret.write_text("secret")
        self.tcp = socket.create_server(("127.0.0.1", 0), backlog=500)
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        self.unix, self.path = socket.socket(socket.AF_UNIX), str(self.folder / "socket")
        self.unix.bind(self.path)
        self.unix.listen(500)
        self.datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.datagrams.bind(self.path + ".dgram")
        for path in (self.folder, *self.folder.rglob("*")):
            os.chown(path, uid, uid)
        self.process = subprocess.Popen(["sleep", "600"], user=uid, group=uid, extra_groups=[])
        self.pid = self.process.pid
        self.channel, self.pool_end = socket.socketpair()
        self.other, self.other_end = socket.socketpair()
        self.uid = uid


def attempts(v: Victims) -> Attempts:
    """Return the attempts by the phrase of docs/threats.md that denies them, and their names.

    Any result but an error is a success; what is made is removed.
    """
    return {**on_files(v), **on_processes(v), **on_the_network(v), **on_the_kernel()}


def on_files(v: Victims) -> Attempts:
    file = str(v.file)
    new = v.folder / "new"
    reading = os.open(file, os.O_RDONLY)
    return {
        "write, truncate, remove, rename or make a file": {
            "write a file": lambda: new.write_text("x"),
            "write in place": lambda: os.open(file, os.O_RDWR),
            "truncate": lambda: os.truncate(file, 0),
            "truncate on opening": lambda: os.open(file, os.O_RDONLY | os.O_TRUNC),
            "remove": v.file.unlink,
            "make a folder": new.mkdir,
        },
        "change a file's mode, owner, times or attributes": {
            "chmod": lambda: v.file.chmod(0o777),
            "chown": lambda: os.chown(file, v.uid, v.uid),
            "utime": lambda: os.utime(file, (0, 0)),
            "setxattr": lambda: os.setxattr(file, "user.new", b"x"),
        },
        "lock a file": {
            "flock": lambda: fcntl.flock(reading, fcntl.LOCK_EX | fcntl.LOCK_NB),
            "take a lease": lambda: fcntl.fcntl(
                os.open(v.leased, os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_RDLCK
            ),
        },
        "read a file outside of Python, its libraries and the folders of modules": {
            "read a credential": v.secret.read_text,
            "list a home": lambda: os.listdir(v.secret.parent),
            "read the system's users": lambda: open("/etc/passwd").read(),
        },
    }


def on_processes(v: Victims) -> Attempts:
    def wait_for(pid: int) -> None:
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)

    def start_a_thread() -> None:
        thread = threading.Thread(target=time.monotonic)
        thread.start()
        thread.join()

    def own_a_file() -> None:
        fcntl.fcntl(v.channel, fcntl.F_SETOWN, v.pid)

    def allocate() -> None:
        bytearray(int(1.5 * MEMORY_GIB * 2**30))

    def open_many() -> None:
        for _ in range(400):
            os.pipe()

    return {
        "execute a program": {
            "execute": lambda: os.execv("/bin/true", ["true"]),
            "start a program": lambda: subprocess.run(["/bin/true"], check=True),
        },
        "start a process or a thread": {"fork": lambda: wait_for(os.fork()), "start a thread": start_a_thread},
        "signal a process or change its limits, priority or CPUs": {
            "signal": lambda: os.kill(v.pid, 0),
            "have it signalled": own_a_file,
            "limit another process": lambda: resource.prlimit(v.pid, resource.RLIMIT_CORE, (0, 0)),
            "slow another process": lambda: os.setpriority(os.PRIO_PROCESS, v.pid, 19),
            "move another process": lambda: os.sched_setaffinity(v.pid, {0}),
        },
        "read another process's environment or memory": {
            "read an environment": lambda: open(f"/proc/{v.pid}/environ").read(),
            "read another process's memory": lambda: os.open(f"/proc/{v.pid}/mem", os.O_RDONLY),
        },
        "outlive its parent": {"outlive its parent": lambda: system(157, 1, 0, 0, 0, 0)},
        "raise its limits": {
            "raise its limit": lambda: resource.setrlimit(resource.RLIMIT_CORE, (1, 1)),
            "allocate too much": allocate,
            "open many files": open_many,
            "become another user": lambda: system(105, v.uid),
        },
    }


def on_the_network(v: Victims) -> Attempts:
    def connect(family: int, kind: int, protocol: int, address: Any) -> Callable[[], Any]:
        def attempt() -> None:
            with socket.socket(family, kind, protocol) as one:
                one.settimeout(5)
                one.connect(address)
                one.sendall(b"hello")

        return attempt

    def send_from_a_pair() -> None:
        one, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        one.sendto(b"hello", v.path + ".dgram")

    stream, datagram, inet, unix = socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.AF_INET, socket.AF_UNIX
    return {
        "open a socket (TCP, MPTCP, UDP, unix, netlink, raw or any other)": {
            "connect by TCP": connect(inet, stream, 0, v.tcp.getsockname()),
            "connect by MPTCP": connect(inet, stream, 262, v.tcp.getsockname()),
            "send by UDP": connect(inet, datagram, 0, v.udp.getsockname()),
            "connect to a unix socket": connect(unix, stream, 0, v.path),
            "send from a pair of sockets": send_from_a_pair,
            "pass a file to the pool": lambda: socket.send_fds(v.other, [b"x"], [0]),
        }
    }


def on_the_kernel() -> Attempts:
    """Return calls of the kernel's other doors; with these arguments, most fail with an error of their own."""
    return {
        "make shared memory, queues or semaphores": {
            "make shared memory": lambda: system(31, system(29, 0, 4096, 0o600), 0, None),
            "make a message queue": lambda: system(71, system(68, 0, 0o600), 0, None),
            "make semaphores": lambda: system(66, system(64, 0, 1, 0o600), 0, 0),
        },
        "a system call of another ABI or of a later kernel": {
            "call by x32": lambda: system(0x40000000 + 39),
            "use a call of a later kernel": lambda: system(10_000),
        },
        "io_uring, userfaultfd, keyctl, bpf, perf, mount, unshare": {
            "use keyctl": lambda: system(250, 0, -2, 0),
            "set up io_uring": lambda: system(425, 1, ctypes.create_string_buffer(120)),
            "catch page faults": lambda: system(323, 1),
            "load BPF": lambda: system(321, 0, None, 0),
            "open a performance counter": lambda: system(298, None, 0, -1, -1, 0),
            "mount": lambda: system(165, None, None, None, 0, None),
            "unshare": lambda: system(272, 0x10000000),
        },
    }


# Errors of a call that was let through.
INNER = {errno.EFAULT, errno.EINVAL, errno.EBADF, errno.ENOENT, errno.ENOSYS, errno.ENODEV, errno.ENOKEY}
INNER |= {errno.EPROTONOSUPPORT}


def outcome_of(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except OSError as error:
        return "done" if error.errno in INNER else errno.errorcode[error.errno or 0]
    except (MemoryError, RuntimeError, ValueError) as error:
        return type(error).__name__
    return "done"


def run_attempt(v: Victims, confinement: Confinement | None, attempt: Callable[[], Any]) -> str:
    """Return the attempt's outcome, from a child that reports it on the channel it has inherited."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(v.uid)
            os.setuid(v.uid)
            die_with_parent(parent)
            if confinement is not None:
                confinement.enter()
            v.channel.sendall(outcome_of(attempt).encode())
        except BaseException as error:
            v.channel.sendall(f"failed: {error!r}".encode())
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    if (v.folder / "new").is_dir():
        (v.folder / "new").rmdir()
    (v.folder / "new").unlink(missing_ok=True)
    if not v.file.exists():
        v.file.write_text("kept")
        os.chown(v.file, v.uid, v.uid)
    if select.select([v.pool_end], [], [], 0)[0]:
        return v.pool_end.recv(1000).decode()
    return "done" if status == 0 else f"status {status}"  # it became another program


CASES: dict[str, tuple[int, Protection | None]] = {
    "free": (0, None),
    "root": (0, Protection(99, True)),
    "nobody": (NOBODY, Protection(99, True)),
    "filter alone": (NOBODY, Protection(0, True)),
    "nothing": (NOBODY, Protection(0, False)),
    **{f"Landlock {n} alone": (NOBODY, Protection(n, False)) for n in (1, 2, 3, 4, 5, 6)},
}
# By a part of the gaps that Protection states: attempts that a kernel with this gap lets through.
GAPS = {
    "read every file": ("read a credential",),
    "memory and environment": ("read an environment", "read another process's memory"),
    "remove and make files": ("remove", "make a folder"),
    "execute programs": ("execute",),
    "truncate files": ("truncate",),
    "TCP connections": ("connect by TCP",),
    "signal processes": ("signal",),
    "sockets of other kinds": ("connect by MPTCP", "send by UDP", "connect to a unix socket"),
    "lock files": ("flock",),
    "modes": ("chmod",),
    "limits": ("limit another process",),
}


def main(folder: Path) -> None:
    here = protection_here()
    of_gaps = {name for names in GAPS.values() for name in names}
    outcomes: dict[str, dict[str, dict[str, str]]] = {}
    for case, (uid, level) in CASES.items():
        case_folder = folder / case
        case_folder.mkdir()
        v = Victims(case_folder, uid)
        confinement = None
        if level is not None:
            level = Protection(min(level.landlock, here.landlock), level.has_filter and here.has_filter)
            confinement = Confinement(MEMORY_GIB, [str(v.file), str(v.leased)], level)
        try:
            outcomes[case] = {
                promise: {
                    name: run_attempt(v, confinement, attempt)
                    for name, attempt in tried.items()
                    if uid == 0 or case == "nobody" or name in of_gaps
                }
                for promise, tried in attempts(v).items()
            }
            assert v.process.poll() is None, f"{case}: the victim is dead"
        finally:
            v.process.kill()
            v.process.wait()
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
