"""What `grpo-ray top` reads of a run: its state, its newest metrics and its newest events."""

import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from grpo_ray.errors import RunError
from grpo_ray.telemetry.json_lines import read_last_lines
from grpo_ray.telemetry.run_files import RunDirectory
from grpo_ray.telemetry.run_state import RunState, read_state

NUM_STEPS, NUM_EVENTS = 20, 5
SILENT_S = 10.0  # the state is written twice a second


@dataclass(frozen=True)
class RunView:
    """One look at a run's folder."""

    path: Path
    state: RunState | None
    steps: list[dict[str, Any]]  # the newest lines of metrics.jsonl, oldest first
    events: list[dict[str, Any]]
    looked_at: float  # seconds since the epoch
    silence: str | None  # what can be said of a driver that says nothing

    @property
    def is_over(self) -> bool:
        return self.state is not None and self.state.ending is not None


def look(run: RunDirectory) -> RunView:
    """Read what there is.

    Raises:
        RunError: the folder is no run's, cannot be read, or a file in it is damaged.
    """
    try:
        if not run.config_path.exists():
            raise RunError(f"{run.path}: no run to look at (it has no config.yaml)")
        state, now = read_state(run), time.time()
        return RunView(
            path=run.path,
            state=state,
            steps=_tail(run.metrics_path, NUM_STEPS),
            events=_tail(run.events_path, NUM_EVENTS),
            looked_at=now,
            silence=None if state is None else silence_of(state, now),
        )
    except (OSError, ValueError) as error:
        raise RunError(str(error)) from error


def _tail(path: Path, num_lines: int) -> list[dict[str, Any]]:
    return read_last_lines(path, num_lines) if path.exists() else []


def silence_of(state: RunState, now: float) -> str | None:
    """In words, if the run should have written since; it may be that only its disk is full."""
    silent_s = now - state.time
    if state.ending is not None or silent_s < SILENT_S:
        return None
    driver = f"its driver (process {state.pid} on {state.host}) has written nothing for {silent_s:.0f} s"
    if state.host != socket.gethostname():
        return f"{driver}; look there whether it is alive"
    if not is_alive(state):
        return f"{driver} and is gone: it was killed, as by kill -9 or for lack of memory"
    return f"{driver} but is alive: it is stopped or stuck, or its disk is full"


def is_alive(state: RunState) -> bool:
    """Whether the driver's process is there, and no other that got its number; on its own host alone."""
    try:
        process = psutil.Process(state.pid)
        is_same = abs(process.create_time() - state.process_started) < 2
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.AccessDenied:  # where users do not see each other's processes
        return True
    except psutil.NoSuchProcess:
        return False
