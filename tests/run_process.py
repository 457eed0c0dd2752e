"""Waiting for a run in another process, and finding its actors."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path


def wait_until(process: subprocess.Popen[str], condition: Callable[[], bool], timeout_s: float = 240) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "the run did not get that far"
        time.sleep(0.02)


def wait_for_step(process: subprocess.Popen[str], folder: Path, step: int, timeout_s: float = 90) -> None:
    wait_until(process, lambda: num_lines(folder / "metrics.jsonl") >= step, timeout_s)


def num_lines(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0


def pid_of(folder: Path, name: str) -> int:
    """Return the pid of the actor `name`."""
    return int((folder / "logs" / f"{name}.pid").read_text().split()[1])
