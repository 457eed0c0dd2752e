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
from typing import IO

from grpo_ray.rewards.isolation.confinement import die_with_parent
from grpo_ray.run.machine import GpuPool
from grpo_ray.run.signals import signals_handled
from grpo_ray.tools.experiments.experiment_plan import PlannedRun

PROGRAM = (sys.executable, "-m", "grpo_ray")
POLL_S = 0.1
OnEnd = Callable[[PlannedRun, int, float, str | None], None]
"""Given a run, its exit status (negative: of the signal that ended it), seconds, and error in one line."""


def run_all(
    runs: Sequence[PlannedRun], base: str, jobs: int, on_start: Callable[[PlannedRun], None], on_end: OnEnd,
    program: Sequence[str],
) -> bool:  # fmt: skip
    """Run all of them; return False if a signal came first, after which the running ones are waited for."""
    waiting, pool = deque(runs), GpuPool([run.config for run in runs])
    children: list[_Child] = []
    came: list[int] = []  # signals

    def stop(number: int, _: object) -> None:
        """Forward SIGINT and SIGTERM to the children as SIGINT: the first makes them save, the second exit."""
        came.append(number)
        for child in children:
            child.process.send_signal(signal.SIGINT)

    with signals_handled((signal.SIGINT, signal.SIGTERM), stop):
        while children or (waiting and not came):
            while waiting and len(children) < jobs and not came:
                if (gpus := pool.take(waiting[0].config)) is None:
                    break
                run = waiting.popleft()
                on_start(run)
                children.append(_Child(run, [*program, "train", base, *run.overrides], gpus))
                if came:  # the signal came during its start
                    children[-1].process.send_signal(signal.SIGINT)
            time.sleep(POLL_S)
            for child in [child for child in children if child.process.poll() is not None]:
                children.remove(child)
                pool.give_back(child.gpus)
                on_end(child.run, *child.ended())
    return not came


class _Child:
    def __init__(self, run: PlannedRun, command: Sequence[str], gpus: Sequence[str]) -> None:
        self.run, self.gpus = run, gpus
        run.log.parent.mkdir(parents=True, exist_ok=True)
        self._log: IO[bytes] = run.log.open("ab")
        self._begin = self._log.tell()
        self._started = time.monotonic()
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else None,
            start_new_session=True, preexec_fn=partial(_end_with, os.getpid()),
        )  # fmt: skip

    def ended(self) -> tuple[int, float, str | None]:
        """Return status, seconds, and the error: its first line, or else the last line that the run wrote."""
        self._log.close()
        status, seconds = self.process.returncode, time.monotonic() - self._started
        if status <= 0:
            return status, seconds, f"ended by {signal.Signals(-status).name}" if status else None
        text = self.run.log.read_bytes()[self._begin :].decode("utf-8", errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        ours = [line.removeprefix("grpo-ray: ") for line in lines if line.startswith("grpo-ray: ")]
        return status, seconds, (ours or lines or [f"exit status {status}"])[-1]


def _end_with(launcher: int) -> None:
    """Get SIGHUP at the launcher's end: once for each of its threads, and it alone does not count twice."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` is for the launcher
    die_with_parent(launcher, signal.SIGHUP)
