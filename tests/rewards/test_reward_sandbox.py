"""The sandbox of grading workers: each line of docs/threats.md, tried as root and as another user."""

import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from sandbox_attempts import CASES, GAPS

from grpo_ray.config import Config
from grpo_ray.rewards.isolation.confinement import Protection, protection_here
from grpo_ray.rewards.isolation.readable import readable_paths
from grpo_ray.run import preflight

Outcomes = dict[str, dict[str, str]]
REFUSALS = {"EPERM", "EACCES", "EMFILE", "MemoryError", "ValueError", "RuntimeError"}

# Phrases of docs/threats.md, and the attempts that they deny.
PROMISES = {
    "write, truncate, remove, rename or make a file": (
        "write a file", "append", "write in place", "make an empty file", "make a file without a name",
        "make a file with creat", "write with openat2", "truncate", "truncate on opening",
        "truncate an open file", "allocate an open file", "remove", "rename", "make a folder", "make a link",
        "make a symbolic link", "make a pipe",
    ),
    "change a file's mode, owner, times or attributes": (
        "chmod", "fchmod", "fchmodat2", "chown", "fchown", "utime", "setxattr", "removexattr",
        "change attributes",
    ),
    "lock a file": ("flock", "lock a range", "take a lease"),
    "read a file outside of Python, its libraries and the folders of modules": (
        "read a credential", "list a home", "read the system's users",
    ),
    "read another process's environment or memory": (
        "read an environment", "read another process's memory", "read with process_vm_readv", "ptrace",
    ),
    "execute a program": ("execute", "start a program", "spawn"),
    "start a process or a thread": ("fork", "fork by number", "clone3", "start a thread"),
    "signal a process or change its limits, priority or CPUs": (
        "signal", "signal its group", "signal with tgkill", "signal with a value", "signal by descriptor",
        "have it signalled", "limit another process", "read another's limits", "slow another process",
        "move another process", "schedule another process",
    ),
    "outlive its parent": ("outlive its parent",),
    "open a socket (TCP, MPTCP, UDP, unix, netlink, raw or any other)": (
        "connect by TCP", "connect by MPTCP", "send by UDP", "listen", "connect to a unix socket",
        "connect to an abstract socket", "send to a unix socket", "send from a pair of sockets",
        "ask the kernel by netlink", "use the kernel's ciphers", "open a raw socket", "open a packet socket",
        "pass a file to the pool",
    ),
    "make shared memory, queues or semaphores": (
        "make shared memory", "make a message queue", "make semaphores", "make a POSIX queue",
        "make memory with a name", "make secret memory",
    ),
    "raise its limits": (
        "raise its limit", "allocate too much", "open many files", "enlarge a pipe", "become another user",
    ),
    "io_uring, userfaultfd, keyctl, bpf, perf, mount, unshare": (
        "set up io_uring", "catch page faults", "add a key", "request a key", "use keyctl", "load BPF",
        "open a performance counter", "mount", "mount anew", "unshare", "enter a namespace", "chroot",
        "load a module", "load a kernel", "reboot", "read the kernel's log", "watch files", "watch all files",
        "open by handle", "set the clock", "raise its I/O privilege", "change its personality",
        "filter calls", "use Landlock",
    ),
    "a system call of another ABI or of a later kernel": (
        "call by x32", "call by i386", "use a call of a later kernel",
    ),
}  # fmt: skip

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
        result = subprocess.run([sys.executable, script, folder], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    outcomes: Outcomes = json.loads(result.stdout)
    return outcomes


@full
@pytest.mark.slow
@pytest.mark.parametrize("user", ["root", "nobody"])
@pytest.mark.parametrize("promise", PROMISES)
def test_a_worker_cannot(outcomes: Outcomes, promise: str, user: str) -> None:
    results = {name: outcomes[user][name] for name in PROMISES[promise]}
    assert set(results.values()) <= REFUSALS, results
    assert outcomes[user]["victim"] == "alive"


@full
@pytest.mark.slow
def test_each_attempt_is_possible_without_the_sandbox(outcomes: Outcomes) -> None:
    named = [name for names in PROMISES.values() for name in names]
    assert sorted([*named, "victim"]) == sorted(outcomes["root"]) == sorted(outcomes["free"])
    assert {name: result for name, result in outcomes["free"].items() if result != "done"} == {
        "victim": "alive"
    }


def test_the_page_on_threats_has_the_promises_that_are_tried() -> None:
    text = " ".join(Path("docs/threats.md").read_text().split())
    assert [promise for promise in PROMISES if promise not in text] == []


# ---- kernels that offer less ----


@full
@pytest.mark.slow
@pytest.mark.parametrize("case", [name for name, (_, level) in CASES.items() if level and name != "root"])
def test_the_gaps_that_are_stated_are_those_that_there_are(outcomes: Outcomes, case: str) -> None:
    _, level = CASES[case]
    assert level is not None
    stated = "; ".join(level.gaps)
    for gap, names in GAPS.items():
        let_through = [outcomes[case][name] == "done" for name in names]
        assert let_through == [gap in stated] * len(names), (gap, stated)


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
    monkeypatch.setattr(preflight, "protection_here", lambda: Protection(landlock=0, has_filter=True))
    notices = preflight.check_files(tiny_config).notices
    assert not [notice for notice in notices if "isolated" in notice]  # its reward needs no process
    task = tiny_config.task.model_copy(update={"reward": "r1_zero"})
    notices = preflight.check_files(tiny_config.model_copy(update={"task": task})).notices
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
    with pytest.raises(ValueError, match=r"scorer\.readable_paths: there is no '/no/such'; give files"):
        readable_paths(["/no/such"])
