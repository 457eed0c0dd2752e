"""A training run as its operator sees it: processes, signals and growing files."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
from chaos_cluster import Cluster
from chaos_disk import Disk
from chaos_memory import Memory

from grpo_ray.config import Config
from grpo_ray.config.loading import load_config
from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.run.machine import WAITING_THREADS

DRIVER = Path(__file__).with_name("chaos_driver.py")
TRIGGERS = "GRPO_RAY_CHAOS_TRIGGERS"
INTERRUPTED = 130
NOT_NICE = {"RAY_worker_niceness": "0"}  # Ray's 15 starves the actors on a machine that is shared


class RunEnded(RuntimeError):
    """The run's own process ended without a request."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


def wait_until_gone(
    processes: list[psutil.Process], timeout_s: float, waiting_counts: bool = True
) -> list[psutil.Process]:
    """Wait for processes to end, and return those that are left after the timeout; zombies count as ended.

    Args:
        waiting_counts: also count a process that waits in the kernel for a disk as left.
    """
    ended = {psutil.STATUS_ZOMBIE} if waiting_counts else {psutil.STATUS_ZOMBIE, psutil.STATUS_DISK_SLEEP}
    deadline = time.monotonic() + timeout_s
    while left := [process for process in processes if _is_there(process, ended)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return left


def _is_there(process: psutil.Process, ended: set[str]) -> bool:
    try:
        return process.is_running() and process.status() not in ended
    except psutil.NoSuchProcess:
        return False


class ChaosRun:
    """One run, driven by a child process with its output in `folder`/driver.log.

    It lies in `folder`/run, or on the disk that `mount` puts there. `wrong` collects what must not be.
    """

    def __init__(self, folder: Path, disk: Disk | None = None, memory: Memory | None = None) -> None:
        self.folder, self.disk, self.memory = folder, disk, memory
        self.path = (disk.path if disk else folder) / "run"  # as the driver knows it
        self.run = RunDirectory((disk.view if disk else folder) / "run")
        self.triggers, self.clock = folder / "triggers", folder / "clock"
        self.clock.unlink(missing_ok=True)
        self.triggers.mkdir(parents=True, exist_ok=True)
        for trigger in self.triggers.iterdir():  # of a campaign that was interrupted
            trigger.unlink()
        # The driver loads torch before it could choose how its threads wait.
        more = {TRIGGERS: str(self.triggers.resolve()), **NOT_NICE, **WAITING_THREADS}
        self.environment = {**os.environ, **more}
        self.cluster: Cluster | None = None
        self.stopped: list[psutil.Process] = []  # hung, never continued
        self.must_end: list[psutil.Process] = []  # by the end of the recovery
        self.must_say: list[tuple[str, str]] = []  # by then: an event's kind, and a pattern in its text
        self.wrong: list[str] = []
        self._driver: subprocess.Popen[bytes] | None = None

    # The driver

    def start(self, config: str, overrides: list[str]) -> None:
        self._begin("train", config, *overrides, f"run.output_dir={self.path.parent}", "run.name=run")

    def resume(self, *overrides: str) -> None:
        self._begin("resume", str(self.path), *overrides)

    def _begin(self, *arguments: str) -> None:
        assert self._driver is None, "one driver at a time"
        self._driver = self.launch(*arguments, log=self.folder / "driver.log")

    def launch(self, *arguments: str, log: Path) -> subprocess.Popen[bytes]:
        """Start the command line, with its output appended to `log`."""
        with log.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, str(DRIVER), *arguments],
                env=self.environment | (self.cluster.environment if self.cluster else {}),
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
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
            raise RunEnded(f"the driver ended with status {status}: {self.last_words()}", status)

    def last_words(self) -> str:
        lines = (self.folder / "driver.log").read_text(errors="replace").strip().splitlines()
        return " / ".join(lines[-3:])[-500:]

    def has_used_up_a_budget(self) -> bool:
        """Return whether the driver's output ends with the error of a budget."""
        lines = (self.folder / "driver.log").read_text(errors="replace").splitlines()
        return any("within an hour are used up" in line for line in lines[-6:])

    def kill(self, number: int = signal.SIGKILL) -> str:
        """Kill the driver; everything that it started must be gone soon, also in /dev/shm."""
        with self.gone_afterwards() as gone:
            self.signal(number)
            self.wait_for_end(60.0)
        return gone[0]

    @contextlib.contextmanager
    def gone_afterwards(self) -> Iterator[list[str]]:
        """Wait until all that the driver has started is gone; what is left is wrong. Yields what to say."""
        processes, shared, said = self.processes(), self._shared_memory(), [""]
        yield said
        started = time.monotonic()
        self.wrong += [f"process {process.pid} was still there" for process in wait_until_gone(processes, 60.0)]
        here = Path("/dev/shm")
        self.wrong += [f"{here / name} was still there" for name in sorted(shared) if (here / name).exists()]
        said[0] = f"all gone after {time.monotonic() - started:.1f} s"

    def signal(self, number: int) -> None:
        assert self._driver is not None
        self._driver.send_signal(number)

    def interrupt(self) -> int:
        """Send SIGTERM to the driver; returns its exit status, or raises TimeoutError."""
        self.signal(signal.SIGTERM)
        return self.wait_for_end(120.0)

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
            self.signal(signal.SIGKILL)
            self.wait_for_end(60.0)
        for process in wait_until_gone(processes, 20.0):
            process.kill()

    def bury(self) -> None:
        """Kill the hung and other processes that the run did not end, which is wrong."""
        for process in wait_until_gone([*self.stopped, *self.must_end], 15.0):
            process.kill()
            self.wrong.append(f"the process {process.pid} was still there")
        self.stopped, self.must_end = [], []

    def check_said(self, since: float) -> None:
        """Look for the events that the fault must cause; one that is missing is wrong."""
        for kind, pattern in self.must_say:
            said = [event["text"] for event in self.events(since, kind)]
            if not any(re.search(pattern, text) for text in said):
                self.wrong.append(f"no event {kind} matches {pattern}: {said}")
        self.must_say = []

    def heal(self) -> None:
        """Undo what a fault that failed half-way may have left."""
        if self.disk:
            self.disk.heal(self.path)
        self.clock.unlink(missing_ok=True)
        for process in self.stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.stopped, self.must_end, self.must_say = [], [], []
        if self._driver is not None:
            self.signal(signal.SIGCONT)
            if self._driver.poll() is not None:
                self._driver = None

    # Its processes

    def processes(self) -> list[psutil.Process]:
        """Return the processes that the driver started, and on a cluster the actors'."""
        found = {actor for name in self.actors() if (actor := self.actor(name))}
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= set(psutil.Process(self.driver_pid).children(recursive=True))
        for process in list(found):
            with contextlib.suppress(psutil.NoSuchProcess):
                found |= set(process.children(recursive=True))
        return list(found)

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
        """Return the actor's process, if it exists and is a Ray worker (the file may be an ended actor's)."""
        try:
            process = psutil.Process(int((self.run.logs / f"{name}.pid").read_text().split()[1]))
            return process if "ray::" in " ".join(process.cmdline()) else None
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

    def events(self, since: float, *kinds: str) -> list[dict[str, Any]]:
        rows = _rows_of(self.run.events_path)
        return [row for row in rows if row["time"] >= since and (not kinds or row["kind"] in kinds)]

    def num_errors(self, step: int, since: float) -> int:
        """Count responses that were not graded: in steps after `step`, and in later evaluations."""
        rows = _rows_of(self.run.metrics_path)
        in_training = sum(row["reward/errors"] for row in rows if row["step"] > step)
        files = [path for path in self.run.evaluations.glob("step-*.parquet") if path.stat().st_mtime > since]
        tables = [pq.read_table(path, columns=["error"]) for path in files]
        return int(in_training + sum(len(table) - table["error"].null_count for table in tables))

    def wait_for(
        self, condition: Callable[[], bool], timeout_s: float, what: str, every_s: float = 0.1
    ) -> None:
        """Wait for the condition; raises RunEnded if the driver ends first, or TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            self.check_alive()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {timeout_s:g} s: {self.last_words()}")
            time.sleep(every_s)

    @property
    def config(self) -> Config:
        return load_config(self.run.config_path)


def _rows_of(path: Path) -> list[dict[str, Any]]:
    return read_metrics(path) if path.exists() else []
