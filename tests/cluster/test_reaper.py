"""The reaper of a process tree after its root has died: real processes, no Ray."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from run_process import until

from grpo_ray.cluster import reaper
from grpo_ray.cluster.reaper import LOOK_S, process_at, start_reaper

pytestmark = pytest.mark.slow

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(120)"]
END_S = 60.0  # for processes to be ended, less than they sleep
# Each has a session of its own, as Ray's processes do: the end of one does not end those below it.
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
    """Pids of processes that a test started; they are killed after it."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def run(program: str, started: list[int]) -> tuple[subprocess.Popen[str], list[int]]:
    """Start a driver; return it, and the pids that it prints."""
    driver = subprocess.Popen([sys.executable, "-c", program, *SLEEP], stdout=subprocess.PIPE, text=True)
    started.append(driver.pid)
    with driver.stdout as output:
        pids = [int(word) for word in output.readline().split()]
    started += pids
    return driver, pids


def test_all_descendants_of_a_killed_driver_are_ended_and_nothing_else(started: list[int]) -> None:
    """There are two drivers; the process below the first dies early and leaves an orphan."""
    stranger = subprocess.Popen(SLEEP)
    started.append(stranger.pid)
    drivers, families = zip(*(run(DRIVER, started) for _ in range(2)), strict=True)
    time.sleep(2 * LOOK_S + 0.5)
    assert all(process_at(pid) for family in families for pid in family)  # while the drivers live, so do they
    _, middle, below = families[0]  # the first is the reaper
    os.kill(middle, signal.SIGKILL)
    time.sleep(2 * LOOK_S)
    assert process_at(below)
    for driver in drivers:
        driver.kill()
        driver.wait()
    for watcher, middle, below in families:
        until(lambda pids=(middle, below, watcher): not any(map(process_at, pids)), END_S)  # type: ignore[misc]
    assert stranger.poll() is None


HALF_DEAD = """
import ctypes, os, subprocess, sys, threading, time
from grpo_ray.cluster.reaper import LOOK_S, start_reaper
reaper = start_reaper()
child = subprocess.Popen(sys.argv[1:], start_new_session=True)
time.sleep(4 * LOOK_S)  # until the reaper knows the child, on a busy machine too
threading.Thread(target=time.sleep, args=(120,), daemon=True).start()
print(reaper.pid, child.pid, flush=True)
ctypes.PyDLL(None).pthread_exit(None)  # with the GIL, so that the other thread never runs again
"""


def test_a_driver_with_a_thread_in_the_kernel_is_dead_although_its_pipe_is_open(started: list[int]) -> None:
    """After SIGKILL a thread that waits for a frozen disk is left; here it outlives the main thread."""
    driver, (watcher, child) = run(HALF_DEAD, started)
    until(lambda: not process_at(child) and not process_at(watcher), END_S)
    assert driver.poll() is None  # its thread keeps it, and the pipe
    driver.kill()
    driver.wait()


STARTING = """
import subprocess, sys, time
import ray
from grpo_ray.cluster import session
from grpo_ray.cluster.reaper import LOOK_S

def init(**_):
    agent = subprocess.Popen(sys.argv[1:], start_new_session=True)
    time.sleep(2 * LOOK_S)  # until the reaper knows it
    print(agent.pid, flush=True)
    time.sleep(120)

ray.init = init
with session.connected(): pass
"""


@pytest.mark.campaign
def test_a_driver_that_is_killed_while_ray_starts_leaves_no_agent(started: list[int]) -> None:
    """Ray's own agents wait a minute for a server that is gone."""
    driver, (agent,) = run(STARTING, started)
    driver.kill()
    driver.wait()
    until(lambda: not process_at(agent), END_S)


GENTLE_DRIVER = """
import psutil, subprocess, sys, time
from grpo_ray.cluster.reaper import start_reaper
reaper = start_reaper()
child, switches = subprocess.Popen(sys.argv[1:]), psutil.Process(reaper.pid).num_ctx_switches
twice = switches().voluntary + 3  # when it has looked twice since
while switches().voluntary < twice: time.sleep(0.05)
reaper.stdin.close()
time.sleep(1.0)
print(reaper.poll(), child.poll(), flush=True)
child.terminate()
print(child.wait(timeout=600), reaper.wait(timeout=600), flush=True)
"""


def test_processes_have_time_to_end_by_themselves() -> None:
    """Reaper and child live on for a second; then the child ends on its own (by SIGTERM) and is not killed."""
    driver = [sys.executable, "-c", GENTLE_DRIVER, *SLEEP]
    done = subprocess.run(driver, capture_output=True, text=True, timeout=600)
    assert done.stdout.split() == ["None", "None", str(-signal.SIGTERM), "0"], done.stderr


def test_a_process_that_has_ended_is_not_alive_nor_one_that_has_its_pid() -> None:
    own = process_at(os.getpid())
    assert own[0] == os.getpid()
    assert reaper._alive({own}) == {own}
    assert reaper._alive({(own[0], str(int(own[1]) - 1))}) == set()
    with subprocess.Popen([sys.executable, "-S", "-c", "pass"]) as child:
        until(lambda: process_at(child.pid) is None)  # not waited for: a zombie
    assert process_at(child.pid) is None


HOLDER = """
import multiprocessing, time
from multiprocessing import resource_tracker
lock = multiprocessing.get_context("spawn").Lock()
print(resource_tracker._resource_tracker._pid, lock._semlock.name, flush=True)
time.sleep(120)
"""


def test_only_a_killed_process_loses_its_semaphore(started: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The reaper's loop runs here: one process is killed after its first look, before it is dismissed."""
    command = [sys.executable, "-c", HOLDER]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as dead,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as living,
    ):
        started += [dead.pid, living.pid]
        (tracker, left), (_, kept) = dead.stdout.readline().split(), living.stdout.readline().split()
        paths = [reaper.SHARED_MEMORY / f"sem.{name.removeprefix('/')}" for name in (left, kept)]
        looks = []

        def select(*waiting: object) -> tuple[object, ...]:
            looks.append(waiting)
            if len(looks) == 1:
                return [], [], []
            for pid in (int(tracker), dead.pid):  # both, as Ray does
                os.kill(pid, signal.SIGKILL)
            dead.wait()
            assert [path.exists() for path in paths] == [True, True]
            return waiting[:3]

        monkeypatch.setattr(reaper, "select", SimpleNamespace(select=select))
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"done")))
        reaper._main(os.getpid())
        assert [path.exists() for path in paths] == [False, True]
        assert living.poll() is None  # a reaper that is dismissed kills nothing
        living.terminate()
    until(lambda: not paths[1].exists())  # its own tracker's work
    watcher = start_reaper()
    reaper.dismiss(watcher)
    assert watcher.returncode == 0


def test_a_semaphore_made_at_the_end_is_removed(started: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver's child, which the first look finds, makes one; the driver is killed before the next."""
    left: list[Path] = []
    parent = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    command = [sys.executable, "-c", parent, sys.executable, "-c", f"input(){HOLDER}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
        started.append(driver.pid)

        def looks() -> Iterator[tuple[object, ...]]:
            until(lambda: reaper._descendants([driver.pid]))
            yield [], [], []
            print(file=driver.stdin, flush=True)
            left.append(reaper.SHARED_MEMORY / f"sem.{driver.stdout.readline().split()[1][1:]}")
            assert left[0].exists()
            driver.kill()
            driver.wait()
            yield [], [], []

        own = looks()
        monkeypatch.setattr(reaper, "select", SimpleNamespace(select=lambda *_: next(own)))
        monkeypatch.setattr(reaper, "GRACE_S", 1.0)
        reaper._main(driver.pid)
        assert not left[0].exists()
