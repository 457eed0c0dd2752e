"""Restores from the last checkpoint, for when an actor dies that cannot be replaced on its own."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from grpo_ray.actors.clients import RunActors
from grpo_ray.config import Config
from grpo_ray.errors import RunError, shown_plainly
from grpo_ray.run.controller import RECOVERABLE, Controller
from grpo_ray.run.preflight import Prepared
from grpo_ray.run.restarts import RestartBudget
from grpo_ray.telemetry.checkpoint import Checkpoint, CheckpointStore, make_store
from grpo_ray.telemetry.run_files import RunDirectory
from grpo_ray.telemetry.run_log import Display, RunLog
from grpo_ray.telemetry.trackers import NO_TRACKERS, Trackers
from grpo_ray.types import StartingModel

RETRY_S = 2.0

# (config, model, run directory, checkpoint) -> a context manager: the actors, which end with its block.
Host = Callable[[Config, StartingModel, Path, Checkpoint | None], AbstractContextManager[RunActors]]


def train_through_restores(
    config: Config,
    prepared: Prepared,
    run: RunDirectory,
    display: Display,
    host: Host,
    drive: Callable[[Controller], None],
    trackers: Trackers = NO_TRACKERS,
) -> None:
    """Train to the end, from the newest checkpoint if there is one.

    When a Learner or buffer dies, or the run stalls, the steps since the last checkpoint are lost: every actor
    is restarted, just as `grpo-ray resume` would do.

    Args:
        drive: runs the controller to its end.

    Raises:
        RunError: `recovery.max_restores` are used up, or the actors did not even start.
    """
    recovery = config.recovery
    budget = RestartBudget(recovery.max_restarts, recovery.restart_backoff_s)
    store = make_store(config, run)
    beginning = prepared.ledger.state_dict()
    failures: list[str] = []
    while len(failures) <= recovery.max_restores:
        checkpoint = _restore(store, run, display)
        with shown_plainly():
            prepared.ledger.load_state_dict(checkpoint.state.ledger if checkpoint else beginning, ())
        log = RunLog(run, display, trackers)
        step = checkpoint.state.step if checkpoint else 0
        trackers.resume_from(step)
        if failures:
            log.event("restored", None, f"the run continues from step {step}")
        with host(config, prepared.model, run.path.resolve(), checkpoint) as actors:
            controller = Controller(config, prepared, actors, log, store, budget, checkpoint)
            try:
                return drive(controller)
            except RECOVERABLE as error:
                failures.append(str(error))
                log.event("run_failed", getattr(error, "name", None), str(error))
                if not controller.has_begun and len(failures) == 1:
                    raise RunError(f"{error}\nThe actors' output is in {run.logs}/") from error
    raise RunError(
        f"recovery.max_restores: the run went back to its last checkpoint {recovery.max_restores} times. "
        f"The first error was: {failures[0]}\nThe actors' output is in {run.logs}/; {how_to_resume(run)}"
    )


def _restore(store: CheckpointStore, run: RunDirectory, display: Display) -> Checkpoint | None:
    """Return the newest complete checkpoint, after removing all later steps from the run directory."""
    store.discard_unfinished()
    checkpoint = store.latest()
    for line in store.damaged:
        display.warning(f"skipped a damaged checkpoint: {line}")
    while True:
        try:
            run.rewind(checkpoint.state.step if checkpoint else 0)
            break
        except OSError as error:
            display.warning(f"the run directory cannot be reset to its last checkpoint yet: {error}")
            time.sleep(RETRY_S)
    if checkpoint is not None:
        display.status(f"resuming from {checkpoint.path}")
    return checkpoint


def how_to_resume(run: RunDirectory) -> str:
    return f"resume with: grpo-ray resume {run.path}"
