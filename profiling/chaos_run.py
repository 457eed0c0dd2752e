"""A training run as its operator sees it: processes, signals and growing files."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from chaos_driver import TRIGGERS

from grpo_ray.telemetry.rollout_log import read_rollouts
from grpo_ray.telemetry.run_files import RunDirectory, read_metrics
from grpo_ray.tools.audit.rollouts import RolloutRows

DRIVER = Path(__file__).with_name("chaos_driver.py")
INTERRUPTED = 130


class RunEnded(RuntimeError):
    """The run's own process ended without a request."""


def wait_until_gone(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait for processes to end, and return those that are left after the timeout; zombies count as ended."""
    deadline = time.monotonic() + timeout_s
    while left := [process for process in processes if _is_there(process)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return left


def _is_there(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class ChaosRun:
    """One run in `folder`/run, driven by a child process with its output in `folder`/driver.log."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = RunDirectory(folder / "run")
        self.triggers = folder / "triggers"
        self.triggers.mkdir(parents=True, exist_ok=True)
        self.stopped: list[psutil.Process] = []  # hung, never continued
        self._driver: subprocess.Popen[bytes] | None = None

    # The driver

    def start(self, config: str, overrides: list[str]) -> None:
        self._begin("train", config, *overrides, f"run.output_dir={self.folder}", "run.name=run")

    def resume(self, *overrides: str) -> None:
        self._begin("resume", str(self.run.path), *overrides)

    def _begin(self, *arguments: str) -> None:
        assert self._driver is None, "one driver at a time"
        with (self.folder / "driver.log").open("ab") as log:
            self._driver = subprocess.Popen(
                [sys.executable, str(DRIVER), *arguments],
                env={**os.environ, TRIGGERS: str(self.triggers.resolve())},
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    @property
    def is_driven(self) -> bool:
        return self._driver is not None

    @property
    def driver_pid(self) -> int:
        assert self._driver is not None
        return self._driver.pid

    def check_alive(self) -> None:
        """Raise RunEnded with the driver's last words if it is gone; `resume` may follow."""
        if self._driver is not None and self._driver.poll() is not None:
            status, self._driver = self._driver.returncode, None
            raise RunEnded(f"the driver ended with status {status}: {self.last_words()}")

    def last_words(self) -> str:
        lines = (self.folder / "driver.log").read_text(errors="replace").strip().splitlines()
        return " / ".join(lines[-3:])[-500:]

    def kill(self) -> tuple[float, list[str]]:
        """Kill the driver; returns the seconds until everything it started was gone, and what was left."""
        processes, shared = self.processes(), self._shared_memory()
        assert self._driver is not None
        started = time.monotonic()
        self._driver.kill()
        self._driver.wait()
        self._driver = None
        left = [f"process {process.pid}" for process in wait_until_gone(processes, 60.0)]
        left += [f"/dev/shm/{name}" for name in sorted(shared) if (Path("/dev/shm") / name).exists()]
        return time.monotonic() - started, left

    def interrupt(self, timeout_s: float = 120.0) -> int:
        """Send SIGTERM to the driver; returns its exit status, or raises TimeoutError."""
        assert self._driver is not None
        self._driver.send_signal(signal.SIGTERM)
        return self.wait_for_end(timeout_s)

    def wait_for_end(self, timeout_s: float) -> int:
        assert self._driver is not None
        try:
            status = self._driver.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the driver did not end within {timeout_s:g} s: {self.last_words()}") from None
        self._driver = None
        return status

    def end(self) -> None:
        """End what is left of the run, gently if possible."""
        if self._driver is None:
            return
        processes = self.processes()
        try:
            self.interrupt()
        except TimeoutError:
            self.kill()
        for process in wait_until_gone(processes, 20.0):
            process.kill()

    def bury_stopped(self) -> list[str]:
        """Kill the hung processes that the run did not end; returns a message for each."""
        left = wait_until_gone(self.stopped, 15.0)
        for process in left:
            process.kill()
        self.stopped = []
        return [f"the stopped process {process.pid} was still there" for process in left]

    # Its processes

    def processes(self) -> list[psutil.Process]:
        """Return the processes that the driver started."""
        try:
            return psutil.Process(self.driver_pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def _shared_memory(self) -> set[str]:
        """Return the names in /dev/shm that the run's processes have mapped."""
        names: set[str] = set()
        for pid in [self.driver_pid, *(process.pid for process in self.processes())]:
            try:
                maps = Path(f"/proc/{pid}/maps").read_text()
            except OSError:  # it has just ended
                continue
            names |= set(re.findall(r"/dev/shm/(\S+)$", maps, re.MULTILINE))
        return names

    def actors(self) -> list[str]:
        return sorted(path.stem for path in self.run.logs.glob("*.pid"))

    def actor(self, name: str) -> psutil.Process | None:
        """Return the actor's process, if it exists."""
        try:
            return psutil.Process(int((self.run.logs / f"{name}.pid").read_text().split()[1]))
        except (OSError, IndexError, psutil.NoSuchProcess):
            return None

    # What it has written

    def last_step(self) -> int:
        """Return the step of the newest line in metrics.jsonl; 0 before the first."""
        try:
            lines = self.run.metrics_path.read_bytes().split(b"\n")[:-1]
        except OSError:
            return 0
        return int(json.loads(lines[-1])["step"]) if lines else 0

    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.run.metrics_path) if self.run.metrics_path.exists() else []

    def events(self, since: float, *kinds: str) -> list[dict[str, Any]]:
        path = self.run.events_path
        rows = read_metrics(path) if path.exists() else []
        return [row for row in rows if row["time"] >= since and (not kinds or row["kind"] in kinds)]

    def num_errors(self, step: int, since: float) -> int:
        """Count responses that were not graded: in steps after `step`, and in later evaluations."""
        in_training = sum(row["reward/errors"] for row in self.metrics() if row["step"] > step)
        files = [path for path in self.run.evaluations.glob("step-*.parquet") if path.stat().st_mtime > since]
        return int(in_training) + sum(RolloutRows(f.name, read_rollouts(f)).num_errors for f in files)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Wait for the condition; raises RunEnded if the driver ends first, or TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            self.check_alive()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {timeout_s:g} s")
            time.sleep(0.1)
