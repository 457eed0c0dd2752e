"""Restores from the last checkpoint, for when an actor dies that cannot be replaced on its own."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path

from grpo_ray.config import Config
from grpo_ray.core.checkpointing import GIVE_UP_S, RETRY_S
from grpo_ray.core.clients import RunActors
from grpo_ray.core.context import Prepared
from grpo_ray.core.controller import RECOVERABLE, Controller
from grpo_ray.errors import FORGED, OutOfDeviceMemory, RunError, shown_plainly
from grpo_ray.records.checkpoint import Checkpoint, CheckpointStore
from grpo_ray.records.run_files import RunDirectory, last_logged_step
from grpo_ray.types import StartingModel
from grpo_ray.watch.background import BackgroundThread
from grpo_ray.watch.detectors import FailureWatch
from grpo_ray.watch.restarts import RestartBudget
from grpo_ray.watch.run_log import Display, RunLog
from grpo_ray.watch.trackers import NO_TRACKERS, Trackers

# (config, model, run directory, checkpoint) -> a context manager: the actors, which end with its block.
Host = Callable[[Config, StartingModel, Path, Checkpoint | None], AbstractContextManager[RunActors]]


def train_through_restores(
    config: Config, prepared: Prepared, run: RunDirectory, display: Display, host: Host,
    drive: Callable[[Controller], None], trackers: Trackers = NO_TRACKERS,
) -> None:  # fmt: skip
    """Train to the end, from the newest checkpoint if there is one.

    When a Learner or buffer dies, or the run stalls, the steps since the last checkpoint are lost: every actor
    is restarted, just as `grpo-ray resume` would do.

    Args:
        drive: runs the controller to its end.

    Raises:
        RunError: `recovery.max_restores` are used up, the actors did not even start, or no checkpoint is whole.
    """
    recovery = config.recovery
    budget = RestartBudget("recovery.max_restarts", recovery.max_restarts, recovery.restart_backoff_s)
    restores = _Restores(recovery.max_restores)
    store, failure = CheckpointStore(run, config.checkpoint), ""
    while True:
        checkpoint = _restore(store, run, display, failure)
        with shown_plainly():
            prepared.prompts.load_state_dict(checkpoint.state.ledger if checkpoint else None)
        log = RunLog(run, display, trackers, FailureWatch.of_run(config, run.metrics_path))
        step = checkpoint.state.step if checkpoint else 0
        trackers.resume_from(step)
        log.step = step
        if restores.num_failures:
            log.event("restored", None, f"the run continues from step {step}")
        with closing(log), host(config, prepared.model, run.path.resolve(), checkpoint) as actors:
            controller = Controller(config, prepared, actors, log, store, budget, checkpoint)
            try:
                return drive(controller)
            except RECOVERABLE as error:
                log.event("run_failed", getattr(error, "name", None), str(error))
                if isinstance(error, OutOfDeviceMemory):
                    config = _with_smaller_micro_batches(config, error.num_tokens, log)
                is_disturbed = FORGED in str(error)  # by a process that is no part of the run
                failure = f"{error}\nThe actors' output is in {run.logs}/"
                if not controller.has_begun and not restores.num_failures and not is_disturbed:
                    raise RunError(f"{failure}; {how_to_resume(run)}") from error
                try:
                    restores.count(controller.version, str(error))
                except RunError as used_up:
                    where = f"The actors' output is in {run.logs}/; {how_to_resume(run)}"
                    raise RunError(f"{used_up}\n{where}") from error


def _with_smaller_micro_batches(config: Config, num_tokens: int, log: RunLog) -> Config:
    """Return the configuration for the rest of this process; a micro-batch of `num_tokens` did not fit."""
    most = config.learner.micro_batch_tokens
    smaller = max(1, min(most, num_tokens or most) // 2)
    log.event("learner_out_of_memory", "learner", f"continues with learner.micro_batch_tokens {smaller}")
    return config.changed(learner={"micro_batch_tokens": smaller})


class _Restores:
    """A count of the run's failures, against `recovery.max_restores`: per hour, and without progress."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._budget = RestartBudget("recovery.max_restores", limit, backoff_s=0)
        self._furthest, self._in_vain = -1, 0
        self.num_failures = 0

    def count(self, step: int, error: str) -> None:
        """Count a failure after `step`; raises RunError for too many in an hour, or without a new step."""
        self.num_failures += 1
        if step > self._furthest:
            self._furthest, self._in_vain = step, 0
        self._in_vain += 1
        self._budget.spend("run", error)
        if self._in_vain > self._limit:
            raise RunError(
                f"recovery.max_restores: the run went back to its last checkpoint {self._limit} times without "
                f"getting beyond step {step}. The last error was: {error}"
            )


def no_whole_checkpoint(run: RunDirectory, damaged: Sequence[str]) -> str:
    """Return the reason not to begin a run again that has had a checkpoint: its records would be deleted."""
    return (
        f"{run.checkpoints} has no whole checkpoint, so the run would begin again and delete the records of "
        f"its {last_logged_step(run.metrics_path)} steps; put one back, or train a new run. "
        + "; ".join(damaged)
    )


def _restore(store: CheckpointStore, run: RunDirectory, display: Display, failure: str) -> Checkpoint | None:
    """Return the newest complete checkpoint, after removing all later steps from the run directory.

    It is tried until no OSError comes of it, in a thread, so that a signal ends a try that hangs.

    Args:
        failure: of this process's last try, for the error.

    Raises:
        RunError: the records before it are damaged, all are gone, or nothing can be changed for `GIVE_UP_S`.
    """

    def restore() -> Checkpoint | None:
        newest = store.latest()
        if newest is None and store.has_had_one:
            raise RunError(f"{no_whole_checkpoint(run, store.damaged)}\n{failure}")
        store.discard_unfinished()
        run.rewind(newest.state.step if newest else 0)
        return newest

    disk, give_up_at = BackgroundThread("restore"), time.monotonic() + GIVE_UP_S
    try:
        while True:
            try:
                checkpoint = disk.call("the run directory", restore).result(give_up_at - time.monotonic())
                break
            except OSError as error:
                reason = str(error) or "the disk does not answer"
                if time.monotonic() + RETRY_S >= give_up_at:  # another try would have no time
                    raise RunError(
                        f"the run directory could not be reset to its last checkpoint for {GIVE_UP_S:g} s: "
                        f"{reason}; make it writable, and resume"
                    ) from error
                display.warning(f"the run directory cannot be reset to its last checkpoint yet: {reason}")
                time.sleep(RETRY_S)
    finally:
        disk.close(0.0)
    for line in store.damaged:
        display.warning(f"skipped a damaged checkpoint: {line}")
    if checkpoint is not None:
        display.status(f"resuming from {checkpoint.path}")
    return checkpoint


def how_to_resume(run: RunDirectory) -> str:
    return f"resume with: {run.resume_command}"
