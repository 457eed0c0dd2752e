"""`state.json`: a run's current state, readable without Ray (`grpo-ray top`)."""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil
from pydantic import BaseModel, ConfigDict

from grpo_ray.records.durable import replacing
from grpo_ray.records.evaluation_summary import EvaluationSummary
from grpo_ray.records.json_lines import storable_json
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.watch.background import BackgroundThread
from grpo_ray.watch.run_log import Display, Metrics

EVERY_S = 0.5
MAX_SHARE = 0.005  # of the writing thread's time: with many Generators and open calls it writes less often
LAST_WRITE_S = 5.0  # a hanging disk delays the end of the run no longer
MAX_WARNINGS = 8
MAX_UNSHOWN = 10_000  # lines; later ones are not shown


class _Part(BaseModel):
    """A part of the state; fields of a later version are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)


class ActorState(_Part):
    """The calls that an actor has not answered yet."""

    name: str
    doing: str | None = None
    """Oldest open call, in words; None: the actor is idle."""
    for_s: float = 0.0
    """Seconds since that call was made."""
    num_calls: int = 0
    """Number of open calls."""
    is_waiting: bool = False
    """True if the actor itself waits for others, as a buffer does for groups."""


class LiveStatus(_Part):
    """The controller's view of the run at one moment."""

    step: int = 0
    """Last trained step, which is the Learner's version."""
    published_version: int = 0
    """Version that the Generators sample with."""
    num_sampling: int = 0
    """Groups between dispatch and the buffer."""
    num_buffered: int = 0
    """Scored groups waiting to be trained."""
    actors: tuple[ActorState, ...] = ()
    is_evaluating: bool = False
    """True while validation prompts are sampled, possibly in parallel with training."""
    is_stopping: bool = False
    """True if the run ends after the current step, with a checkpoint."""


class Ending(_Part):
    """The way a run ended."""

    kind: Literal["finished", "stopped", "failed"]
    text: str = ""
    """Reason, and how to resume."""


class RunState(_Part):
    """The contents of `state.json`."""

    time: float
    """Time of writing, in seconds since the epoch."""
    host: str
    pid: int
    """The driver's process."""
    process_started: float
    """Start of that process, in seconds since the epoch: its pid may have been reused since."""
    began: float
    """Start or latest resume of the run, in seconds since the epoch."""
    num_steps: int
    is_local: bool = False
    phase: str
    now: LiveStatus = LiveStatus()
    warnings: tuple[str, ...] = ()
    """Warnings shown since the last step, or since the start."""
    ending: Ending | None = None


def read_state(run: RunDirectory) -> RunState | None:
    """Return the run's state; None if it has not been written.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        return RunState.model_validate_json(storable_json(json.loads(run.state_path.read_bytes())))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{run.state_path} is not a valid run state ({error}); remove it") from None


class RunReporter:
    """A display that forwards everything to another one, and keeps the run's current state.

    All calls return at once: the other display's output may go to a file on a disk that hangs.
    """

    def __init__(self, display: Display, output: BackgroundThread, num_steps: int, is_local: bool) -> None:
        self._display, self._output, self._num_steps, self._is_local = display, output, num_steps, is_local
        self._phase = "starting"
        self._began = time.time()
        self._process_started = psutil.Process().create_time()
        self._live_status: Callable[[], LiveStatus] = LiveStatus
        self._warnings: list[str] = []
        self.on_step: Callable[[int, Metrics], None] | None = None  # of a Python program

    def follow(self, live_status: Callable[[], LiveStatus]) -> None:
        """Read the live status from the controller from now on; called from another thread."""
        self._live_status = live_status

    def state(self, ending: Ending | None = None) -> RunState:
        now = self._live_status()
        phase = "evaluating the policy" if now.is_evaluating else self._phase
        return RunState(
            time=time.time(),
            host=socket.gethostname(),
            pid=os.getpid(),
            process_started=self._process_started,
            began=self._began,
            num_steps=self._num_steps,
            is_local=self._is_local,
            phase="stopping after this step" if now.is_stopping else phase,
            now=now,
            warnings=tuple(self._warnings),
            ending=ending,
        )

    def status(self, text: str) -> None:
        self._phase = text
        self._show(self._display.status, text)

    def step(self, step: int, metrics: Metrics) -> None:
        self._warnings, self._phase = [], "training"
        self._show(self._display.step, step, dict(metrics))
        if self.on_step is not None:
            self.on_step(step, dict(metrics))

    def evaluation(self, summary: EvaluationSummary) -> None:
        self._show(self._display.evaluation, summary)

    def warning(self, text: str) -> None:
        if text not in self._warnings:
            self._warnings = [*self._warnings, text][-MAX_WARNINGS:]
        self._show(self._display.warning, text)

    def _show(self, show: Callable[..., None], *what: Any) -> None:
        if self._output.num_waiting < MAX_UNSHOWN:
            self._output.submit("output", partial(show, *what))


@contextlib.contextmanager
def reported(run: RunDirectory, num_steps: int, display: Display) -> Iterator[RunReporter]:
    """Keep `state.json` up to date from a thread; the last write says how the block ended.

    Training never waits for it: on a full or slow disk the file only becomes stale.
    """
    output = BackgroundThread("output")
    reporter, ended = RunReporter(display, output, num_steps, run.is_local), threading.Event()
    endings: list[Ending] = []
    writer = threading.Thread(
        target=_keep_writing, args=(run.state_path, reporter, ended, endings), name="run-state", daemon=True
    )
    writer.start()
    try:
        yield reporter
        endings.append(Ending(kind="finished"))
    except KeyboardInterrupt as interrupt:
        endings.append(Ending(kind="stopped", text=str(interrupt)))
        raise
    except BaseException as error:
        endings.append(Ending(kind="failed", text=str(error) or type(error).__name__))
        raise
    finally:
        ended.set()
        writer.join(LAST_WRITE_S)
        output.close(LAST_WRITE_S)


def _keep_writing(path: Path, reporter: RunReporter, ended: threading.Event, endings: list[Ending]) -> None:
    was_written, wait_s = True, EVERY_S
    while True:
        is_last = ended.wait(wait_s)
        began = time.thread_time()
        try:
            state = reporter.state(endings[0] if is_last else None)
            with replacing(path, fsync=False) as partial:
                partial.write_bytes(storable_json(state.model_dump()))
            was_written = True
        except Exception as error:  # of a full disk, or a mistake: this thread must not end without a word
            if was_written:
                reporter.warning(
                    f"{path}: {str(error) or type(error).__name__}; `grpo-ray top` shows a stale state"
                )
            was_written = False
        if is_last:
            return
        wait_s = max(EVERY_S if was_written else 10 * EVERY_S, (time.thread_time() - began) / MAX_SHARE)
