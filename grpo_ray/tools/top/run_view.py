"""A run as `grpo-ray top` reads it: its state, its newest metrics and its newest events."""

import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from grpo_ray.config.loading import read_config
from grpo_ray.errors import RunError
from grpo_ray.records.json_lines import STEP, read_lines
from grpo_ray.records.resumable_folder import LOCK_NAME
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.records.run_lock import is_taken_since
from grpo_ray.watch.run_state import RunState, read_state

NUM_STEPS, NUM_EVENTS = 20, 5
SILENT_S = 10.0  # the state is written twice a second


@dataclass(frozen=True)
class RunView:
    """The contents of a run's folder at one time."""

    path: Path
    state: RunState | None
    steps: list[dict[str, Any]]  # the newest lines of metrics.jsonl, oldest first
    events: list[dict[str, Any]]
    read_at: float  # seconds since the epoch
    config: dict[str, Any]  # config.yaml as it is
    is_resumed: bool = False  # by a process that has not written a state yet

    @property
    def silence(self) -> str | None:
        """A sentence about a driver that has stopped writing."""
        return None if self.state is None else silence_of(self.state, self.read_at)

    @property
    def is_over(self) -> bool:
        return self.state is not None and self.state.ending is not None and not self.is_resumed


def read_view(run: RunDirectory) -> RunView:
    """Read the run's files.

    Raises:
        RunError: the folder is not a run's, cannot be read, or has a damaged file.
    """
    try:
        if not run.config_path.exists():
            raise RunError(f"{run.path}: not a run to watch (it has no config.yaml)")
        state, now = read_state(run), time.time()
        return RunView(
            path=run.path,
            state=state,
            steps=read_lines(run.metrics_path, NUM_STEPS, STEP),
            events=read_lines(run.events_path, NUM_EVENTS, {"time": int | float, "text": str}),
            read_at=now,
            config=read_config(run.config_path),
            is_resumed=bool(state and state.ending and is_taken_since(run.path / LOCK_NAME, state.time)),
        )
    except (OSError, ValueError) as error:
        raise RunError(str(error)) from error


def silence_of(state: RunState, now: float) -> str | None:
    """Describe a driver that should have written since; None if all is well. Its disk may just be full."""
    silent_s = now - state.time
    if state.ending is not None or silent_s < SILENT_S:
        return None
    span = f"{silent_s:.0f} s" if silent_s < 600 else str(timedelta(seconds=round(silent_s)))
    driver = f"its driver (process {state.pid} on {state.host}) has written nothing for {span}"
    if state.host != socket.gethostname():
        return f"{driver}; check on that host whether it is alive"
    if not is_alive(state):
        return f"{driver} and is gone: it was killed, for example by kill -9 or for lack of memory"
    return f"{driver} but is alive: it is stopped or stuck, or its disk is full"


def is_alive(state: RunState) -> bool:
    """Return True if the driver's process exists, and not another one with its pid; valid on its own host."""
    try:
        process = psutil.Process(state.pid)
        is_same = bool(abs(process.create_time() - state.process_started) < 2)
        return is_same and bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.AccessDenied:  # users may not see each other's processes
        return True
    except psutil.NoSuchProcess:
        return False
