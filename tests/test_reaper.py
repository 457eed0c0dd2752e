"""The reaper beside a process tree whose root dies: real processes, and no Ray."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from grpo_ray.cluster import reaper
from grpo_ray.cluster.reaper import LOOK_S, start_reaper

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(120)"]
# Each in a session of its own, as Ray's processes are: the end of one is not the end of those below it.
MIDDLE = """
import subprocess, sys, time
below = subprocess.Popen(sys.argv[1:], start_new_session=True)
print(below.pid, flush=True)
time.sleep(120)
"""
DRIVER = f"""
import subprocess, sys, time
from grpo_ray.cluster.reaper import start_reaper
reaper = start_reaper()
middle = subprocess.Popen(
    [sys.executable, "-S", "-c", {MIDDLE!r}, *sys.argv[1:]], stdout=subprocess.PIPE, start_new_session=True
)
print(reaper.pid, middle.pid, int(middle.stdout.readline()), flush=True)
time.sleep(120)
"""


@pytest.fixture
def started() -> Iterator[list[int]]:
    """Pids of processes that a test started, which are gone after it."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    """False, too, for one that has ended and that its parent has not asked for."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def sleeper(started: list[int]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(SLEEP)
    started.append(process.pid)
    return process


@pytest.mark.parametrize("middle_dies_first", [True, False])
def test_whatever_descended_from_a_killed_driver_is_ended_and_nothing_else(
    started: list[int], middle_dies_first: bool
) -> None:
    stranger = sleeper(started)
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, *SLEEP], stdout=subprocess.PIPE, text=True)
    started.append(driver.pid)
    assert driver.stdout is not None
    pids = [int(word) for word in driver.stdout.readline().split()]
    started += pids
    watcher, middle, below = pids
    time.sleep(2 * LOOK_S + 0.5)
    assert all(map(is_alive, pids))  # while the driver lives, so do they
    if middle_dies_first:  # and the one below it is nobody's child
        os.kill(middle, signal.SIGKILL)
        time.sleep(2 * LOOK_S)
        assert is_alive(below)
    driver.kill()
    driver.wait()
    driver.stdout.close()
    assert within(10, lambda: not (is_alive(middle) or is_alive(below)))
    assert within(10, lambda: not is_alive(watcher))
    assert stranger.poll() is None


def test_closing_its_stdin_ends_a_reaper_that_has_nothing_to_do(started: list[int]) -> None:
    watcher = start_reaper()
    started.append(watcher.pid)
    time.sleep(0.3)
    assert watcher.poll() is None
    assert watcher.stdin is not None
    watcher.stdin.close()
    assert watcher.wait(timeout=4) == 0  # sooner than its grace


def test_a_dismissed_reaper_kills_nobody(started: list[int]) -> None:
    watcher = start_reaper()
    with subprocess.Popen(SLEEP) as child:
        started += [watcher.pid, child.pid]
        time.sleep(LOOK_S + 0.5)
        reaper.dismiss(watcher)
        assert watcher.returncode == 0
        assert child.poll() is None
        child.terminate()


GENTLE_DRIVER = """
import subprocess, sys, time
from grpo_ray.cluster.reaper import LOOK_S, start_reaper
reaper = start_reaper()
child = subprocess.Popen(sys.argv[1:])
time.sleep(2 * LOOK_S + 0.5)
reaper.stdin.close()
time.sleep(1.0)
print(reaper.poll(), child.poll(), flush=True)
child.terminate()
print(child.wait(timeout=10), reaper.wait(timeout=10), flush=True)
"""


def test_what_ends_by_itself_has_time_to() -> None:
    """Both live on for a second; then the child ends in its own way (by SIGTERM), not killed."""
    driver = [sys.executable, "-c", GENTLE_DRIVER, *SLEEP]
    done = subprocess.run(driver, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["None", "None", str(-signal.SIGTERM), "0"], done.stderr


def test_descendants_are_those_at_any_depth(started: list[int]) -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", MIDDLE, *SLEEP], stdout=subprocess.PIPE) as middle:
        assert middle.stdout is not None
        below = int(middle.stdout.readline())
        started += [middle.pid, below]
        found = {pid for pid, _ in reaper._descendants([os.getpid()])}
        assert {middle.pid, below} <= found
        assert not found & {os.getpid(), os.getppid()}
        assert {pid for pid, _ in reaper._descendants([middle.pid])} == {below}
        middle.kill()


def test_pid_that_another_process_has_by_now_is_not_alive() -> None:
    _, own = reaper._stat(str(os.getpid())) or (0, (0, ""))
    assert own[0] == os.getpid()
    assert reaper._alive({own}) == {own}
    assert reaper._alive({(own[0], str(int(own[1]) - 1))}) == set()


def test_process_that_has_ended_is_not_alive() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", "pass"]) as child:
        assert within(10, lambda: reaper._stat(str(child.pid)) is None)  # not waited for: a zombie
    assert reaper._stat(str(child.pid)) is None


HOLDER = """
import multiprocessing, time
from multiprocessing import resource_tracker
lock = multiprocessing.get_context("spawn").Lock()
print(resource_tracker._resource_tracker._pid, lock._semlock.name, flush=True)
time.sleep(120)
"""


def test_semaphore_of_a_killed_process_is_unlinked_and_a_living_ones_is_kept(started: list[int]) -> None:
    watcher = start_reaper()
    command = [sys.executable, "-c", HOLDER]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as dead,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as living,
    ):
        started += [watcher.pid, dead.pid, living.pid]
        assert dead.stdout is not None
        assert living.stdout is not None
        (tracker, left), (_, kept) = dead.stdout.readline().split(), living.stdout.readline().split()
        time.sleep(2 * LOOK_S)
        for pid in (int(tracker), dead.pid):  # together, as Ray does
            os.kill(pid, signal.SIGKILL)
        dead.wait()
        paths = [reaper.SHARED_MEMORY / f"sem.{name.removeprefix('/')}" for name in (left, kept)]
        assert [path.exists() for path in paths] == [True, True]
        reaper.dismiss(watcher)
        assert [path.exists() for path in paths] == [False, True]
        living.terminate()
    assert within(10, lambda: not paths[1].exists())  # its own tracker's work
