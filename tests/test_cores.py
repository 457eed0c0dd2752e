"""Holding a process to cores, in a process of its own."""

import os
import subprocess
import sys

import pytest

from grpo_ray.policy.cores import hold_to_cores

SCRIPT = """
import os, threading
from grpo_ray.policy.cores import hold_to_cores

end, threads = threading.Event(), []
def start():
    ready = threading.Event()
    threads.append(threading.Thread(target=lambda: (ready.set(), end.wait())))
    threads[-1].start()
    ready.wait()

before = os.sched_getaffinity(0)
for _ in range(4):
    start()
hold_to_cores(None)
assert all(os.sched_getaffinity(int(t)) == before for t in os.listdir("/proc/self/task"))
hold_to_cores([CORE])
start()  # one that comes later
tasks = os.listdir("/proc/self/task")
assert len(tasks) == 6, tasks
print(*(sorted(os.sched_getaffinity(int(t))) for t in tasks))
end.set()
"""


def test_every_thread_is_held_to_the_cores_and_those_to_come_too() -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) == 1:
        pytest.skip("this process may use one core only")
    script = SCRIPT.replace("CORE", str(cores[-1]))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [f"[{cores[-1]}]"] * 6


def test_thread_that_ends_meanwhile_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.listdir("/proc/self/task")
    monkeypatch.setattr(os, "listdir", lambda _: ["999999999", *own])  # no thread has such a number
    hold_to_cores(sorted(os.sched_getaffinity(0)))
