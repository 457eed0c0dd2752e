"""Attempts of code that an answer got run in a grading worker; test_reward_sandbox.py expects each to fail.

    python tests/sandbox_attempts.py FOLDER    prints {case: {attempt: outcome}} as JSON

Every attempt is made in a child of its own, as a case's user and at its level of protection, against victims
outside. An outcome is `done`, or the name of the error. The case `free` has no sandbox.
"""

import ctypes
import errno
import fcntl
import json
import mmap
import os
import resource
import select
import signal
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
        os.setxattr(self.file, "user.mark", b"x")
        self.secret.parent.mkdir(parents=True)
        self.secret.write_text("secret")
        self.tcp = socket.create_server(("127.0.0.1", 0), backlog=500)
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        self.unix, self.abstract = (socket.socket(socket.AF_UNIX) for _ in range(2))
        self.path, self.name = str(self.folder / "socket"), f"\0grpo_ray-{os.getpid()}-{folder.name}"
        for server, address in ((self.unix, self.path), (self.abstract, self.name)):
            server.bind(address)
            server.listen(500)
        self.datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.datagrams.bind(self.path + ".dgram")
        for path in (self.folder, *self.folder.rglob("*")):
            os.chown(path, uid, uid)
        self.process = subprocess.Popen(["sleep", "600"], user=uid, group=uid, extra_groups=[])
        self.pid = self.process.pid
        self.channel, self.pool_end = socket.socketpair()
        self.other, self.other_end = socket.socketpair()
        self.uid = uid


def attempts(v: Victims) -> dict[str, Callable[[], Any]]:
    """Return the attempts by name; any result but an error is a success."""
    return {**on_files(v), **on_processes(v), **on_the_network(v), **on_the_kernel(v)}


def on_files(v: Victims) -> dict[str, Callable[[], Any]]:
    file = str(v.file)
    new = v.folder / "new"
    reading = os.open(file, os.O_RDONLY)
    sealed = os.open(file, os.O_RDWR)
    return {
        "write a file": lambda: new.write_text("x"),
        "append": lambda: v.file.open("a"),
        "write in place": lambda: os.open(file, os.O_RDWR),
        "make an empty file": lambda: os.open(new, os.O_CREAT | os.O_RDONLY),
        "make a file without a name": lambda: os.open(v.folder, os.O_TMPFILE | os.O_RDWR),
        "make a file with creat": lambda: system(85, os.fsencode(new), 0o600),
        "write with openat2": lambda: system(
            437, -100, os.fsencode(file), (ctypes.c_uint64 * 3)(os.O_RDWR), 24
        ),
        "truncate": lambda: os.truncate(file, 0),
        "truncate on opening": lambda: os.open(file, os.O_RDONLY | os.O_TRUNC),
        "truncate an open file": lambda: os.ftruncate(sealed, 0),
        "allocate an open file": lambda: os.posix_fallocate(sealed, 0, 1),
        "remove": v.file.unlink,
        "rename": lambda: v.file.rename(new),
        "make a folder": new.mkdir,
        "make a link": lambda: os.link(file, new),
        "make a symbolic link": lambda: new.symlink_to(file),
        "make a pipe": lambda: os.mkfifo(new),
        "chmod": lambda: v.file.chmod(0o777),
        "fchmod": lambda: os.fchmod(reading, 0o777),
        "fchmodat2": lambda: system(452, -100, os.fsencode(file), 0o777, 0),
        "chown": lambda: os.chown(file, v.uid, v.uid),
        "fchown": lambda: os.fchown(reading, v.uid, v.uid),
        "utime": lambda: os.utime(file, (0, 0)),
        "setxattr": lambda: os.setxattr(file, "user.new", b"x"),
        "removexattr": lambda: os.removexattr(file, "user.mark"),
        "flock": lambda: fcntl.flock(reading, fcntl.LOCK_EX | fcntl.LOCK_NB),
        "lock a range": lambda: fcntl.lockf(reading, fcntl.LOCK_SH | fcntl.LOCK_NB),
        "take a lease": lambda: fcntl.fcntl(os.open(v.leased, os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_RDLCK),
        "change attributes": lambda: fcntl.ioctl(reading, 0x40086602, (0).to_bytes(8, "little")),
        "read a credential": v.secret.read_text,
        "list a home": lambda: os.listdir(v.secret.parent),
        "read the system's users": lambda: open("/etc/passwd").read(),
        "read an environment": lambda: open(f"/proc/{v.pid}/environ").read(),
        "read another process's memory": lambda: os.open(f"/proc/{v.pid}/mem", os.O_RDONLY),
    }


def on_processes(v: Victims) -> dict[str, Callable[[], Any]]:
    def wait_for(pid: int) -> None:
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)

    def start_a_thread() -> None:
        thread = threading.Thread(target=time.monotonic)
        thread.start()
        thread.join()

    def signal_by_descriptor() -> None:
        signal.pidfd_send_signal(os.pidfd_open(v.pid), 0)

    def own_a_file() -> None:
        fcntl.fcntl(v.channel, fcntl.F_SETOWN, v.pid)

    def fork_by_number() -> None:
        wait_for(system(57))

    def allocate() -> None:
        bytearray(int(1.5 * MEMORY_GIB * 2**30))

    def open_many() -> None:
        for _ in range(400):
            os.pipe()

    return {
        "execute": lambda: os.execv("/bin/true", ["true"]),
        "start a program": lambda: subprocess.run(["/bin/true"], check=True),
        "spawn": lambda: os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0),
        "fork": lambda: wait_for(os.fork()),
        "fork by number": fork_by_number,
        "clone3": lambda: system(435, 0, 0),
        "start a thread": start_a_thread,
        "signal": lambda: os.kill(v.pid, 0),
        "signal its group": lambda: os.kill(0, 0),
        "signal with tgkill": lambda: system(234, v.pid, v.pid, 0),
        "signal with a value": lambda: system(129, v.pid, 0, (ctypes.c_int32 * 32)(0, 0, -1)),
        "signal by descriptor": signal_by_descriptor,
        "have it signalled": own_a_file,
        "limit another process": lambda: resource.prlimit(v.pid, resource.RLIMIT_CORE, (0, 0)),
        "read another's limits": lambda: resource.prlimit(v.pid, resource.RLIMIT_CORE),
        "slow another process": lambda: os.setpriority(os.PRIO_PROCESS, v.pid, 19),
        "move another process": lambda: os.sched_setaffinity(v.pid, {0}),
        "schedule another process": lambda: os.sched_setscheduler(v.pid, os.SCHED_BATCH, os.sched_param(0)),
        "ptrace": lambda: system(101, 0x4206, v.pid, 0, 0),
        "read with process_vm_readv": lambda: read_memory(v.pid),
        "outlive its parent": lambda: system(157, 1, 0, 0, 0, 0),
        "raise its limit": lambda: resource.setrlimit(resource.RLIMIT_CORE, (1, 1)),
        "allocate too much": allocate,
        "open many files": open_many,
    }


def read_memory(pid: int) -> int:
    buffer = ctypes.create_string_buffer(8)
    local = (ctypes.c_uint64 * 2)(ctypes.addressof(buffer), 8)
    remote = (ctypes.c_uint64 * 2)(8, 8)
    try:
        return system(310, pid, local, 1, remote, 1, 0)
    except OSError as error:
        if error.errno == errno.EFAULT:  # no memory there, but the access was allowed
            return 0
        raise


def on_the_network(v: Victims) -> dict[str, Callable[[], Any]]:
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

    def listen() -> None:
        socket.create_server(("127.0.0.1", 0))

    stream, datagram, inet, unix = socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.AF_INET, socket.AF_UNIX
    return {
        "connect by TCP": connect(inet, stream, 0, v.tcp.getsockname()),
        "connect by MPTCP": connect(inet, stream, 262, v.tcp.getsockname()),
        "send by UDP": connect(inet, datagram, 0, v.udp.getsockname()),
        "listen": listen,
        "connect to a unix socket": connect(unix, stream, 0, v.path),
        "connect to an abstract socket": connect(unix, stream, 0, v.name),
        "send to a unix socket": connect(unix, datagram, 0, v.path + ".dgram"),
        "send from a pair of sockets": send_from_a_pair,
        "ask the kernel by netlink": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0),
        "use the kernel's ciphers": lambda: system(41, 38, 5, 0),
        "open a raw socket": lambda: system(41, 2, 3, 1),
        "open a packet socket": lambda: system(41, 17, 3, 0),
        "pass a file to the pool": lambda: socket.send_fds(v.other, [b"x"], [0]),
    }


def on_the_kernel(v: Victims) -> dict[str, Callable[[], Any]]:
    """Return calls of the kernel's other doors; with these arguments, each fails with an error of its own."""
    calls = {
        "make memory with a name": (319, b"x", 0),
        "make secret memory": (447, 0),
        "add a key": (248, b"user", b"grpo_ray", b"x", 1, -2),
        "request a key": (249, b"user", b"grpo_ray-none", None, 0),
        "use keyctl": (250, 0, -2, 0),
        "set up io_uring": (425, 1, ctypes.create_string_buffer(120)),
        "catch page faults": (323, 1),
        "load BPF": (321, 0, None, 0),
        "open a performance counter": (298, None, 0, -1, -1, 0),
        "mount": (165, None, None, None, 0, None),
        "mount anew": (428, -100, b"/", 1),
        "unshare": (272, 0x10000000),
        "enter a namespace": (308, -1, 0),
        "chroot": (161, b"/no/such/folder"),
        "load a module": (175, None, 0, None),
        "load a kernel": (246, 0, 0, None, 0),
        "reboot": (169, 0, 0, 0, None),
        "read the kernel's log": (103, 10, None, 0),
        "watch files": (294, 0),
        "watch all files": (300, 0, 0),
        "open by handle": (304, -100, None, 0),
        "set the clock": (227, 99, None),
        "raise its I/O privilege": (172, 99),
        "change its personality": (135, 0xFFFFFFFF),
        "become another user": (105, v.uid),
        "filter calls": (317, 99, 0, None),
        "use Landlock": (444, None, 0, 1),
        "call by x32": (0x40000000 + 39,),
        "enlarge a pipe": (72, os.pipe()[0], 1031, 2**18),
        "use a call of a later kernel": (10_000,),
    }
    made = {  # and removed
        "make shared memory": lambda: system(31, system(29, 0, 4096, 0o600), 0, None),
        "make a message queue": lambda: system(71, system(68, 0, 0o600), 0, None),
        "make semaphores": lambda: system(66, system(64, 0, 1, 0o600), 0, 0),
        "make a POSIX queue": make_a_queue,
        "call by i386": call_by_i386,
    }
    return {name: (lambda call=call: system(*call)) for name, call in calls.items()} | made


def make_a_queue() -> None:
    name = f"grpo_ray-{os.getpid()}".encode()
    system(240, name, os.O_CREAT | os.O_RDWR, 0o600, None)
    system(241, name)


def call_by_i386() -> None:
    """Ask for the process's id through the 32-bit ABI: mov eax, 20; int 0x80; ret."""
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")
    function = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    result = function()
    if result < 0:
        raise OSError(-result, "int 0x80")


# Errors of a call that was let through.
INNER = {errno.EFAULT, errno.EINVAL, errno.EBADF, errno.ENOENT, errno.ESRCH, errno.ENOSYS, errno.ENODEV}
INNER |= {
    errno.EOPNOTSUPP,
    errno.ENOKEY,
    errno.ENOEXEC,
    errno.E2BIG,
    errno.EPROTONOSUPPORT,
    errno.ENOTTY,
    errno.ENODATA,
}
INNER |= {errno.EAFNOSUPPORT}


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
    is_readable, _, _ = select.select([v.pool_end], [], [], 0)
    if is_readable:
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
    outcomes: dict[str, dict[str, str]] = {}
    for case, (uid, level) in CASES.items():
        case_folder = folder / case
        case_folder.mkdir()
        v = Victims(case_folder, uid)
        confinement = None
        if level is not None:
            level = Protection(min(level.landlock, here.landlock), level.has_filter and here.has_filter)
            confinement = Confinement(MEMORY_GIB, [str(v.file), str(v.leased)], level)
        try:
            of_gaps = {name for names in GAPS.values() for name in names}
            outcomes[case] = {
                name: run_attempt(v, confinement, attempt)
                for name, attempt in attempts(v).items()
                if uid == 0 or case == "nobody" or name in of_gaps
            }
            outcomes[case]["victim"] = "alive" if v.process.poll() is None else "dead"
        finally:
            v.process.kill()
            v.process.wait()
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
