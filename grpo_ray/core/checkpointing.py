"""Checkpoints of a run: when one is due, and what it captures."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from grpo_ray.core.context import RunContext
from grpo_ray.records.checkpoint import CheckpointState, CheckpointStore
from grpo_ray.watch.event_loop import gathered
from grpo_ray.watch.run_log import Metrics
from grpo_ray.watch.stage_clock import Duration

GIVE_UP_S = 600.0  # for a disk that is full, read-only or hangs
RETRY_S = 2.0
WAITS = "a checkpoint waits for the records before it: "


class Checkpointing:
    """The checkpoints of a run: captured between two steps, and written while the next steps run.

    A checkpoint holds Learner, buffer and GroupBook. The Learner waits only while its state is copied, and one
    checkpoint is written at a time. One that fails (a full disk) is retried after the next step; until then
    `problem` holds the reason.
    """

    def __init__(
        self, context: RunContext, store: CheckpointStore, book_state: Callable[[], dict[str, Any]], step: int
    ) -> None:
        """`step`: the last step that has a checkpoint."""
        self._config, self._store, self._book_state = context.config.checkpoint, store, book_state
        self._actors, self._calls, self._clock = context.actors, context.calls, context.clock
        self._log, self._on_preemption_s = context.log, context.config.run.on_preemption_s
        self._is_measured = False  # against the time that a preemption leaves
        self._writing: asyncio.Task[None] | None = None
        self._last_saved = step
        self._write_s: float | None = None
        self.problem: str | None = None

    def is_due(self, step: int) -> bool:
        return step % self._config.every_num_steps == 0 or self.problem is not None

    async def begin(self, metrics: Metrics, unwritten: str | None) -> Metrics:
        """Capture the Learner's current version and start writing it; return the time of the capture.

        Args:
            metrics: those of that version's step that are known so far.
            unwritten: the reason that records of earlier steps are not on disk, if so. A run resumed from this
                checkpoint would never write them, so the checkpoint waits for them.
        """
        with self._clock.stage("checkpoint") as duration:
            state = await self._capture(metrics, unwritten)
        if state is None:
            return {}
        self._writing = asyncio.create_task(self._write(state, duration))
        # Or asyncio reports the death of an actor; the next call to that actor ends the run anyway.
        self._writing.add_done_callback(lambda done: done.cancelled() or done.exception())
        return {"timing/checkpoint/capture_s": duration.seconds}

    async def _capture(self, metrics: Metrics, unwritten: str | None) -> CheckpointState | None:
        """Return the state to write, or None when there is nothing new or records are missing."""
        await self.settle()
        if unwritten is not None:
            self.problem = WAITS + unwritten
            return None
        with self._calls.call("learner", "copies its state for a checkpoint"):
            report = await self._actors.learner.capture()
        if report is None or report.version == self._last_saved:
            self.problem = None
            return None
        await self._actors.buffer.capture(report.version)
        return CheckpointState(report.version, self._book_state(), dict(metrics))

    async def settle(self) -> None:
        """Wait until no checkpoint is being written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            await writing

    def take_metrics(self) -> Metrics:
        """Return the duration of the last write; empty if it was returned before."""
        seconds, self._write_s = self._write_s, None
        return {} if seconds is None else {"timing/checkpoint/write_s": seconds}

    async def _write(self, state: CheckpointState, captured: Duration) -> None:
        try:
            with self._clock.span("write checkpoint", f"step {state.step}") as duration:
                self.problem = await self._write_files(state)
        except OSError as error:
            self.problem = f"the checkpoint of step {state.step} could not be written: {error}"
        if self.problem is None:
            self._last_saved, self._write_s = state.step, duration.seconds
            self._compare_with_preemption(captured.seconds + duration.seconds)

    async def _write_files(self, state: CheckpointState) -> str | None:
        """Write the actors' files, and flush all records that the checkpoint vouches for before it appears.

        Returns:
            The reason that it does not appear, if records are missing.
        """
        disk = self._log.writer
        folder = await disk.run("a new checkpoint", partial(self._store.begin, state.step))
        with self._calls.call("learner", f"writes the checkpoint of step {state.step}"):
            # Both have ended before the next attempt, also if one fails.
            of_learner = self._actors.learner.write_captured(folder)
            of_buffer = self._actors.buffer.write_captured(folder / "training")
            files, groups = await gathered([of_learner, of_buffer])
        files = {**files, **{f"training/{name}": size for name, size in groups.items()}}
        if missing := await self._actors.buffer.flush() or await self._log.on_disk():
            return WAITS + missing
        await disk.run("a checkpoint", partial(self._store.commit, state.step, state, files))
        return None

    def _compare_with_preemption(self, seconds: float) -> None:
        """Say once, at the first checkpoint, if a preemption would not leave the time for one."""
        if not self._is_measured and seconds > self._on_preemption_s:
            text = (
                f"a checkpoint takes {seconds:.0f} s, longer than run.on_preemption_s "
                f"({self._on_preemption_s:g} s): a SIGTERM would lose the steps since the last one. Raise it "
                "and the scheduler's grace period, or write checkpoints more often"
            )
            self._log.event("slow_checkpoint", None, text)
        self._is_measured = True
