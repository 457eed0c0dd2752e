"""The sandbox of grading workers: each line of docs/threats.md, tried as root and as another user."""

import errno
import json
import os
import platform
import re
import socket
import struct
import sys
import tempfile
from functools import cache, partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from hostile_rewards import FORGERIES
from run_process import output_of
from sandbox_attempts import CASES, GAPS

from grpo_ray.config import Config
from grpo_ray.rewards.isolation.confinement import Protection, protection_here
from grpo_ray.rewards.isolation.landlock import Ruleset
from grpo_ray.rewards.isolation.messages import Garbage, read_message
from grpo_ray.rewards.isolation.readable import readable_paths
from grpo_ray.rewards.isolation.seccomp import ALLOW, MACHINES, CallFilter
from grpo_ray.rewards.isolation.system_calls import NUMBERS
from grpo_ray.run import preparation

Outcomes = dict[str, dict[str, dict[str, str]]]
REFUSALS = {"EPERM", "EACCES", "EMFILE", "MemoryError", "ValueError", "RuntimeError"}

full = pytest.mark.skipif(
    protection_here().landlock < 6
    or not protection_here().has_filter
    or platform.machine() != "x86_64"
    or os.geteuid() != 0,
    reason="needs root, a kernel with all parts, and the processor of the attempts' numbers",
)


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    """Make all attempts, in all cases; not in one of pytest's folders, which only their owner can enter."""
    script = Path(__file__).parents[1] / "sandbox_attempts.py"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # another user's children work in it
        outcomes: Outcomes = json.loads(output_of(sys.executable, script, folder))
    return outcomes


@full
@pytest.mark.slow
def test_a_worker_cannot_do_what_the_page_on_threats_denies_and_a_free_process_can(outcomes: Outcomes) -> None:
    text = " ".join(Path("docs/threats.md").read_text().split())
    assert outcomes["free"].keys() == outcomes["root"].keys() == outcomes["nobody"].keys()
    for promise, done in outcomes["free"].items():
        assert promise in text
        assert set(done.values()) == {"done"}, done
        for user in ("root", "nobody"):
            denied = outcomes[user][promise]
            assert denied.keys() == done.keys()
            assert set(denied.values()) <= REFUSALS, denied


# ---- kernels that offer less ----


@full
@pytest.mark.slow
@pytest.mark.parametrize("case", [name for name, (_, level) in CASES.items() if level and name != "root"])
def test_the_gaps_that_are_stated_are_those_that_there_are(outcomes: Outcomes, case: str) -> None:
    stated = "; ".join(CASES[case][1].gaps)
    found = {name: result for results in outcomes[case].values() for name, result in results.items()}
    for gap, names in GAPS.items():
        assert [found[name] == "done" for name in names] == [gap in stated] * len(names), (gap, stated)


def test_a_kernel_that_offers_everything_gives_no_notice() -> None:
    assert Protection(landlock=1, has_filter=True).notices == ()  # the filter holds what Landlock 1 does not
    (notice,) = Protection(landlock=2, has_filter=False).notices
    assert "Landlock 2, no filter of system calls" in notice
    assert "truncate files; open TCP connections; signal processes" in notice
    (notice,) = Protection(landlock=0, has_filter=True).notices
    assert "could read every file, and the memory and environment of processes, of this user (docs/" in notice
    assert "no Landlock" in notice


@pytest.mark.slow
def test_a_run_says_at_its_start_what_its_kernel_does_not_hold(
    tiny_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "protection_here", lambda: Protection(landlock=0, has_filter=True))
    notices = preparation.check_files(tiny_config).notices
    assert not [notice for notice in notices if "isolated" in notice]  # its reward needs no process
    task = tiny_config.task.model_copy(update={"reward": "r1_zero"})
    notices = preparation.check_files(tiny_config.model_copy(update={"task": task})).notices
    assert [notice for notice in notices if "grading is less isolated on this machine (no Landlock" in notice]


# ---- files that a worker may read ----


def test_readable_files_leave_out_what_is_hidden_and_what_is_no_module_of_a_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, project = tmp_path / "home", tmp_path / "home" / "project"
    for folder in (home / ".ray", project / ".git", project / "data", home / "package", home / "papers"):
        folder.mkdir(parents=True)
    for file in (home / "rewards.py", home / "keys.txt", home / "package" / "__init__.py", project / ".env"):
        file.touch()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(sys, "path", [str(home), str(project), str(tmp_path)])
    readable = {path for path in readable_paths() if path.startswith(str(tmp_path))}
    assert readable == {str(home / "rewards.py"), str(home / "package"), str(project / "data")}
    assert str(project / ".env") in readable_paths([str(project / ".env")])
    opened = os.listdir("/proc/self/fd")
    with pytest.raises(ValueError, match=r"scorer\.readable_paths: there is no '/no/such'; give files"):
        Ruleset(["/no/such"], version=1)
    assert {*os.listdir("/proc/self/fd")} <= {*opened}  # nor is a ruleset left open
    monkeypatch.setattr(os, "scandir", Mock(side_effect=PermissionError))  # as of another user's folder
    assert not [path for path in readable_paths() if path.startswith(str(tmp_path))]


# ---- what a worker sends ----


@pytest.mark.parametrize("line", FORGERIES.values(), ids=FORGERIES)
def test_only_the_exact_form_is_a_message(line: bytes) -> None:
    if line in (FORGERIES["ready"], FORGERIES["failed"]):
        assert read_message(line)[0] in ("ready", "failed")  # well-formed; test_garbage_... sends it too late
        return
    with pytest.raises(Garbage) as error:
        read_message(line)
    assert len(str(error.value)) < 600


def test_a_message_is_read_as_sent() -> None:
    scores = {"reward": -2, "format_reward": 1, "answer_reward": 0}
    said = ["results", [["scores", scores], ["error", "\ud800 \ud800"]]]
    kind, (found, error) = read_message(json.dumps(said).encode())
    assert (kind, found, str(error)) == ("results", scores, "? ?")  # no file can hold lone surrogates
    assert read_message(b'["ended", "SIGKILL", false, 3]') == ["ended", "SIGKILL", False, 3]


# ---- the filter of system calls as a program, run by a machine of a few lines: also for another processor ----


PID = 4711
DENIED = 0x00050000 | errno.EPERM
OTHER_ABI = 0x40000003  # i386
HEADERS = {
    "x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h",
    "aarch64": "/usr/include/asm-generic/unistd.h",  # the numbers of all newer architectures
}
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
    allows = partial(is_allowed, machine)
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
        found = defined.get(name) or defined.get(f"3264_{name.replace('newfstatat', 'fstatat')}")
        assert number == (int(found) if found is not None else None), name
