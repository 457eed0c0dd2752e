"""Runs in other processes: starting, waiting, finding their actors, comparing what they wrote."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from small_run import QUICKSTART, SMALL

PROGRAM = str(Path(__file__).with_name("any_reward_cli.py"))
EVERY_THIRD = "checkpoint.every_num_steps=3"


def until(condition: Callable[[], bool], limit_s: float = 600) -> None:
    """Wait for what another thread or process does."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def wait_until(process: subprocess.Popen[Any], condition: Callable[[], bool], timeout_s: float = 600) -> None:
    """Wait for what a process does, which must not end before."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "it did not get that far"
        time.sleep(0.02)


def wait_for_step(process: subprocess.Popen[str], folder: Path, step: int, timeout_s: float = 600) -> None:
    wait_until(process, lambda: num_lines(folder / "metrics.jsonl") >= step, timeout_s)


def num_lines(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0


def pid_of(folder: Path, name: str) -> int:
    """Return the pid of the actor `name`."""
    return int((folder / "logs" / f"{name}.pid").read_text().split()[1])


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, PROGRAM, "train", QUICKSTART, *SMALL, EVERY_THIRD]
    command += [f"run.output_dir={folder.parent}", f"run.name={folder.name}", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def output_of(*command: str | Path, timeout_s: float = 600, **options: Any) -> str:
    """Run a program to its end, which has to be a success; return its output."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def resume(folder: Path, *arguments: str) -> None:
    output_of(sys.executable, PROGRAM, "resume", folder, *arguments)


def wait_until_gone(processes: list[psutil.Process], timeout_s: float = 600) -> list[psutil.Process]:
    """Return those that are still there after `timeout_s`."""
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def used_by(driver: subprocess.Popen[str]) -> tuple[list[psutil.Process], set[str]]:
    """Return the processes below a driver, and the files in /dev/shm that all of them use."""
    children, files = psutil.Process(driver.pid).children(recursive=True), set()
    for process in [psutil.Process(driver.pid), *children]:
        with contextlib.suppress(psutil.NoSuchProcess):
            files |= {m.path for m in process.memory_maps() if m.path.startswith("/dev/shm/")}
    return children, files


def interrupt(process: subprocess.Popen[str], folder: Path) -> None:
    """Press Ctrl-C; check that the run says how to go on, and that no process and no shared memory is left."""
    children, shared_memory = used_by(process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 130, output
    assert "never awaited" not in output
    assert f"grpo-ray resume {folder}" in output
    assert wait_until_gone(children) == []
    assert not [path for path in shared_memory if os.path.exists(path)]


def untimed(row: dict[str, Any]) -> dict[str, Any]:
    timed = ("time/", "timing/", "throughput/", "utilization/", "memory/", "perf/")
    return {name: value for name, value in row.items() if not name.startswith(timed)}
