"""Pinning a process to cores, tried in a separate process."""

import os
import subprocess
import sys

import pytest

from grpo_ray.learning.device import hold_to_cores

SCRIPT = """
import os, threading
from grpo_ray.learning.device import hold_to_cores

end, threads = threading.Event(), []
def start():
    ready = threading.Event()
    threads.append(threading.Thread(target=lambda: (ready.set(), end.wait()), daemon=True))
    threads[-1].start()
    ready.wait()

before = os.sched_getaffinity(0)
num_before = len(os.listdir("/proc/self/task"))  # importing torch starts some
for _ in range(4):
    start()
hold_to_cores(None)
assert all(os.sched_getaffinity(int(t)) == before for t in os.listdir("/proc/self/task"))
hold_to_cores([CORE])
start()
tasks = os.listdir("/proc/self/task")
assert len(tasks) == num_before + 5, tasks
print(*{tuple(os.sched_getaffinity(int(t))) for t in tasks})
end.set()
"""


@pytest.mark.slow
def test_running_and_later_threads_are_held_to_the_cores() -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) == 1:
        pytest.skip("this process may use one core only")
    script = SCRIPT.replace("CORE", str(cores[-1]))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"({cores[-1]},)"


def test_thread_that_ends_meanwhile_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.listdir("/proc/self/task")
    monkeypatch.setattr(os, "listdir", lambda _: ["999999999", *own])  # no thread has such a number
    hold_to_cores(sorted(os.sched_getaffinity(0)))
