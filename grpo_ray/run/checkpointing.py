"""When a run writes a checkpoint, and what goes into it."""

import asyncio
from typing import Any

from grpo_ray.config import CheckpointConfig
from grpo_ray.run.open_calls import Watch
from grpo_ray.tasks.prompt_ledger import PromptLedger
from grpo_ray.telemetry.checkpoint import CheckpointState, CheckpointStore
from grpo_ray.telemetry.run_log import Metrics
from grpo_ray.telemetry.stage_clock import StageClock


class Checkpointing:
    """Captures Learner, buffer and ledger between two steps, and writes them beside the next ones.

    The Learner stands still only while its state is copied; one checkpoint is written at a time. One that
    fails (a full disk) is tried again after the next step, and `problem` says why meanwhile.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        store: CheckpointStore,
        actors: Any,
        ledger: PromptLedger,
        watch: Watch,
        clock: StageClock,
        step: int,
    ) -> None:
        self._config, self._store, self._actors, self._ledger = config, store, actors, ledger
        self._watch, self._clock = watch, clock
        self._writing: asyncio.Task[None] | None = None
        self._last_saved = step
        self._write_s: float | None = None
        self.problem: str | None = None

    def is_due(self, version: int) -> bool:
        return version % self._config.every_num_steps == 0 or self.problem is not None

    async def begin(self, metrics: Metrics, unwritten: str | None) -> Metrics:
        """Capture the version that the Learner has, and start writing; returns what it cost so far.

        Args:
            metrics: of that version's step, as far as they are known.
            unwritten: why the records of earlier steps are not on the disk. A run that went on from here
                would never write them, so the checkpoint waits for them.
        """
        with self._clock.stage("checkpoint") as duration:
            state = await self._capture(metrics, unwritten)
        if state is None:
            return {}
        self._writing = asyncio.create_task(self._write(state))
        return {"timing/checkpoint/capture_s": duration.seconds}

    async def _capture(self, metrics: Metrics, unwritten: str | None) -> CheckpointState | None:
        """What is to be written; None when that is not possible, or done already."""
        await self.settle()
        if unwritten is not None:
            self.problem = f"a checkpoint waits for the records before it: {unwritten}"
            return None
        with self._watch.call("learner", "copies its state for a checkpoint"):
            report = await self._actors.learner.capture()
        if report is None or report.version == self._last_saved:
            return None
        await self._actors.buffer.capture(report.version)
        return CheckpointState(report.version, self._ledger.state_dict(), dict(metrics))

    async def settle(self) -> None:
        """Wait until nothing is being written any more."""
        if self._writing is not None:
            await self._writing
            self._writing = None

    def take_metrics(self) -> Metrics:
        """The seconds of the write that ended last, once."""
        seconds, self._write_s = self._write_s, None
        return {} if seconds is None else {"timing/checkpoint/write_s": seconds}

    async def _write(self, state: CheckpointState) -> None:
        try:
            with self._clock.span("write checkpoint", f"step {state.step}") as duration:
                await self._write_files(state)
        except OSError as error:
            self.problem = f"the checkpoint of step {state.step} could not be written: {error}"
        else:
            self.problem, self._last_saved, self._write_s = None, state.step, duration.seconds

    async def _write_files(self, state: CheckpointState) -> None:
        folder = await asyncio.to_thread(self._store.begin, state.step)
        with self._watch.call("learner", f"writes the checkpoint of step {state.step}"):
            await asyncio.gather(
                self._actors.learner.write_captured(folder),
                self._actors.buffer.write_captured(folder / "training"),
            )
        if error := await self._actors.buffer.flush():
            raise OSError(error)
        await asyncio.to_thread(self._store.commit, state.step, state)
