"""`state.json`: what a run is doing now, for whoever looks on without Ray (`grpo-ray top`)."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import psutil
from pydantic import BaseModel, ConfigDict

from grpo_ray.telemetry.durable import replacing
from grpo_ray.telemetry.evaluation_summary import EvaluationSummary
from grpo_ray.telemetry.run_files import RunDirectory
from grpo_ray.telemetry.run_log import Display, Metrics

EVERY_S = 0.5
LAST_WORDS_S = 5.0  # a disk that hangs holds nobody longer
MAX_TROUBLES = 8


class _Part(BaseModel):
    """Fields of a later version are passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)


class ActorState(_Part):
    name: str
    doing: str | None = None
    """What it has been asked to do longest, and has not answered; None: nothing."""
    for_s: float = 0.0
    """Seconds since it was asked."""
    num_calls: int = 0
    """Everything it was asked and has not answered."""
    is_waiting: bool = False
    """For others, as a buffer for its groups."""


class Glance(_Part):
    """What the controller knows at one moment."""

    step: int = 0
    """The newest trained step; the Learner's version."""
    published_version: int = 0
    """The version that the Generators sample with."""
    num_sampling: int = 0
    """Groups on their way from the prompt to the buffer."""
    num_buffered: int = 0
    """Scored groups that wait to be trained."""
    actors: tuple[ActorState, ...] = ()
    is_evaluating: bool = False
    """Validation prompts are sampled; training may go on beside it."""
    is_stopping: bool = False
    """It ends after the present step, with a checkpoint."""


class Ending(_Part):
    kind: Literal["finished", "stopped", "failed"]
    text: str = ""
    """Why, and how to go on."""


class RunState(_Part):
    """A whole `state.json`."""

    time: float
    """When it was written, in seconds since the epoch."""
    host: str
    pid: int
    """The driver's process."""
    process_started: float
    """When that process began, in seconds since the epoch: another may have got its number since."""
    began: float
    """When the run was begun, or gone on with, in seconds since the epoch."""
    num_steps: int
    phase: str
    now: Glance = Glance()
    troubles: tuple[str, ...] = ()
    """What was shown as out of the ordinary since the newest step, and before the first."""
    ending: Ending | None = None


def read_state(run: RunDirectory) -> RunState | None:
    """The run's state; None when it has not been written.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        return RunState.model_validate_json(run.state_path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{run.state_path} is no state of a run ({error}); remove it") from None


class RunReporter:
    """A display that passes everything on, and remembers what is going on."""

    def __init__(self, display: Display, num_steps: int) -> None:
        self._display, self._num_steps = display, num_steps
        self._phase = "starting"
        self._began = time.time()
        self._process_started = psutil.Process().create_time()
        self._glance: Callable[[], Glance] = Glance
        self._troubles: list[str] = []

    def follow(self, glance: Callable[[], Glance]) -> None:
        """From here on this says what the controller knows; it is called from another thread."""
        self._glance = glance

    def state(self, ending: Ending | None = None) -> RunState:
        now = self._glance()
        return RunState(
            time=time.time(),
            host=socket.gethostname(),
            pid=os.getpid(),
            process_started=self._process_started,
            began=self._began,
            num_steps=self._num_steps,
            phase=self._phase_at(now),
            now=now,
            troubles=tuple(self._troubles),
            ending=ending,
        )

    def _phase_at(self, now: Glance) -> str:
        if now.is_stopping:
            return "stopping after this step"
        return "evaluating the policy" if now.is_evaluating else self._phase

    def status(self, text: str) -> None:
        self._phase = text
        self._display.status(text)

    def step(self, step: int, metrics: Metrics) -> None:
        self._troubles, self._phase = [], "training"
        self._display.step(step, metrics)

    def evaluation(self, summary: EvaluationSummary) -> None:
        self._display.evaluation(summary)

    def trouble(self, text: str) -> None:
        if text not in self._troubles:
            self._troubles = [*self._troubles, text][-MAX_TROUBLES:]
        self._display.trouble(text)


@contextlib.contextmanager
def reported(run: RunDirectory, num_steps: int, display: Display) -> Iterator[RunReporter]:
    """Within it, a thread keeps `state.json` up to date; how the block is left are its last words.

    Training never waits for it: a disk that is full or slow only makes the file old.
    """
    reporter, ended = RunReporter(display, num_steps), threading.Event()
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
        writer.join(LAST_WORDS_S)


def _keep_writing(path: Path, reporter: RunReporter, ended: threading.Event, endings: list[Ending]) -> None:
    was_written = True
    while True:
        is_last = ended.wait(EVERY_S if was_written else 10 * EVERY_S)
        state = reporter.state(endings[0] if is_last else None)
        try:
            with replacing(path, fsync=False) as partial:
                partial.write_text(state.model_dump_json())
            was_written = True
        except OSError as error:
            if was_written:
                reporter.trouble(f"{path}: {error}; `grpo-ray top` shows an old state")
            was_written = False
        if is_last:
            return
