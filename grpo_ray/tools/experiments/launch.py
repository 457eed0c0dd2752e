"""Launching an experiment's runs: each in a process of its own, several in parallel, all stopped by Ctrl-C.

A child has its own session. Otherwise a terminal's Ctrl-C would reach it as well, and a run that receives a
second signal does not wait for its checkpoint. If this process is killed, the kernel sends them SIGHUP.
"""

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import IO

from grpo_ray.rewards.isolation.confinement import die_with_parent
from grpo_ray.run.machine import GpuPool
from grpo_ray.run.signals import signals_handled
from grpo_ray.tools.experiments.experiment_plan import PlannedRun

PROGRAM = (sys.executable, "-m", "grpo_ray")
POLL_S = 0.1
OnEnd = Callable[[PlannedRun, int, float, str | None], None]
"""Given a run, its exit status (negative: of the signal that ended it), seconds, and error in one line."""


class Launcher:
    """Runs processes until all have ended, or until a signal; then waits for the running ones."""

    def __init__(
        self, base: str, jobs: int, on_start: Callable[[PlannedRun], None], on_end: OnEnd,
        program: Sequence[str] = PROGRAM,
    ) -> None:  # fmt: skip
        self._base, self._jobs, self._program = base, jobs, program
        self._on_start, self._on_end = on_start, on_end
        self._children: list[_Child] = []
        self._is_stopped = False

    def run_all(self, runs: Sequence[PlannedRun]) -> bool:
        """Run all of them; return False if a signal came first."""
        waiting, pool = deque(runs), GpuPool([run.config for run in runs])
        with signals_handled((signal.SIGINT, signal.SIGTERM), self._stop):
            while self._children or (waiting and not self._is_stopped):
                self._start(waiting, pool)
                time.sleep(POLL_S)
                for child in [child for child in self._children if child.has_ended()]:
                    self._children.remove(child)
                    pool.give_back(child.gpus)
                    self._on_end(child.run, *child.ended())
        return not self._is_stopped

    def _start(self, waiting: deque[PlannedRun], pool: GpuPool) -> None:
        while waiting and len(self._children) < self._jobs and not self._is_stopped:
            gpus = pool.take(waiting[0].config)
            if gpus is None:
                return
            run = waiting.popleft()
            self._on_start(run)
            self._children.append(_Child(run, [*self._program, "train", self._base, *run.overrides], gpus))
            if self._is_stopped:  # the signal came during its start
                self._children[-1].interrupt()

    def _stop(self, *_: object) -> None:
        """Forward SIGINT and SIGTERM to the children as SIGINT: the first makes them save, the second exit."""
        self._is_stopped = True
        for child in self._children:
            child.interrupt()


class _Child:
    def __init__(self, run: PlannedRun, command: Sequence[str], gpus: Sequence[str]) -> None:
        self.run, self.gpus = run, gpus
        run.log.parent.mkdir(parents=True, exist_ok=True)
        self._log: IO[bytes] = run.log.open("ab")
        self._begin = self._log.tell()
        self._started = time.monotonic()
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else None,
            start_new_session=True, preexec_fn=partial(_end_with, os.getpid()),
        )  # fmt: skip

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def ended(self) -> tuple[int, float, str | None]:
        self._log.close()
        status = self._process.returncode
        error = error_in(self.run.log, self._begin, status) if status else None
        return status, time.monotonic() - self._started, error


def _end_with(launcher: int) -> None:
    """Get SIGHUP at the launcher's end: once for each of its threads, and it alone does not count twice."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` is for the launcher
    die_with_parent(launcher, signal.SIGHUP)


def error_in(log: Path, begin: int, status: int) -> str:
    """Return the first line of a run's error, or its last line, from what it wrote after byte `begin`."""
    text = log.read_bytes()[begin:].decode("utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    ours = [line.removeprefix("grpo-ray: ") for line in lines if line.startswith("grpo-ray: ")]
    ending = f"ended by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    return (ours or lines or [ending])[-1] if status >= 0 else ending
