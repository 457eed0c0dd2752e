"""Generator: an engine that samples groups and loads new weights."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from grpo_ray.engines.base import Engine, ReceivingEngine
from grpo_ray.episodes.turn_box import FinishedTurns, TurnBoxes, Turns, Worker
from grpo_ray.transfer.messages import Meeting, WeightSnapshot
from grpo_ray.types import Completion, PromptItem, RolloutGroup, SamplingSettings
from grpo_ray.watch.event_loop import Changes
from grpo_ray.watch.stage_clock import ClockedActor, StageClock

if TYPE_CHECKING:  # it loads torch
    from grpo_ray.transfer.wire import Inbox

# Weights are staged while groups are sampled, which then counts.
SWITCHING = "load_weights", "finish_weights", "resume", "pause"
STAGES = "start", *SWITCHING, "sleep", "generate", "stage_weights"


class Generator(ClockedActor):
    """An engine as an actor. It samples every group on arrival: admission decides when one is dispatched."""

    def __init__(self, name: str, engine: Engine, slowdown_s: float = 0.0, version: int = 0) -> None:
        """`version`: the version of the weights that the engine has loaded."""
        self.name = name
        self._engine = engine
        self._slowdown_s = slowdown_s
        self._version = version
        self._staged: int | None = None  # the version of the staged weights
        self._inbox: Inbox | None = None  # while weights come by a wire to this process
        self._boxes = TurnBoxes(self._sample_turn)
        self._num_running = 0
        self._endings = Changes()
        self._clock = StageClock(STAGES, rest="wait_for_prompts")
        self._asleep = ExitStack()  # a stage that lasts from one call to another

    def __repr__(self) -> str:
        doing = f"{self._clock.current}, {self._num_running} groups running"
        return f"Generator({self.name}, version={self._version}, {doing})"

    async def ready(self) -> bool:
        """Start the engine; return once it serves its first version."""
        with self._clock.stage("start"):
            await self._engine.start(self._version)
        return True

    async def generate(self, item: PromptItem, settings: SamplingSettings) -> tuple[RolloutGroup, int]:
        """Sample the item's completions; return them, and their number of tokens.

        Many calls run concurrently; cancelling one aborts its requests.
        """
        label = f"group {item.group_id}, {settings.num_samples} samples, started at version {self._version}"
        with self._clock.span("rollout", label):
            completions = await self._sample(item.prompt_token_ids, settings)
        num_tokens = sum(len(completion.token_ids) for completion in completions)
        return RolloutGroup(item, completions, self.name), num_tokens

    async def begin_turns(self, worker: Worker, turns: Turns, cancelled: Sequence[int]) -> None:
        """Begin turns of a worker's episodes, and cancel others (episodes/turn_box.py)."""
        self._boxes.of(worker).begin(turns, cancelled)

    async def finished_turns(self, worker: Worker) -> FinishedTurns:
        """Wait for a turn of the worker to finish; return all that have since the last call."""
        return await self._boxes.of(worker).finished()

    async def ping(self) -> None:
        """Return once the engine has answered; at once in a switch: its phases have limits."""
        if self._clock.current not in SWITCHING and hasattr(self._engine, "ping"):  # an own one may have none
            await self._engine.ping()

    async def _sample_turn(self, token_ids: tuple[int, ...], settings: SamplingSettings) -> Completion:
        (completion,) = await self._sample(token_ids, settings)
        return completion

    async def _sample(self, token_ids: tuple[int, ...], settings: SamplingSettings) -> tuple[Completion, ...]:
        """Sample with the engine, which must not sleep meanwhile."""
        self._num_running += 1
        try:
            with self._clock.stage("generate"):
                completions = await self._engine.generate(token_ids, settings)
                if self._slowdown_s:
                    await asyncio.sleep(self._slowdown_s)
            return completions
        finally:
            self._num_running -= 1
            self._endings.announce()

    async def join(self, meeting: Meeting) -> None:
        """Join the wire on which weights will come from the Learner, in place of an earlier one.

        Raises:
            WireError: the Learner did not come.
        """
        if meeting.backend == "nccl":
            assert isinstance(self._engine, ReceivingEngine), "the configuration refuses it"
            with self._clock.stage("pause"):  # it samples nothing meanwhile
                await self._engine.join(meeting)
            return
        from grpo_ray.transfer.wire import Inbox

        self._inbox = self._inbox or Inbox()
        await asyncio.to_thread(self._inbox.join, meeting)

    async def stage_weights(self, snapshot: WeightSnapshot) -> None:
        """Receive all weights of a version, while groups are sampled with the old ones.

        Raises:
            ValueError: the snapshot did not arrive complete, or does not fit the model.
            WireError: the Learner did not send it.
        """
        with self._clock.stage("stage_weights", f"version {snapshot.version}"):
            if snapshot.wire_bytes and self._inbox is not None:
                snapshot = await asyncio.to_thread(self._inbox.received, snapshot)
            if snapshot.specs:
                from grpo_ray.transfer.snapshot import check_snapshot

                await asyncio.to_thread(check_snapshot, snapshot)
            await self._engine.stage(snapshot)
        self._staged = snapshot.version

    async def switch(self, phase_timeout_s: float) -> dict[str, float]:
        """Replace the weights by the staged ones: pause, load, finish, resume; requests in flight are kept.

        A version is set only after the weights are complete, so a partial update is never served as it.

        Returns:
            Seconds per phase, and those that this Generator stood still, as `paused`.

        Raises:
            RuntimeError: names the phase that failed, or that took longer than `phase_timeout_s`.
        """
        assert self._staged is not None, "stage_weights first"
        version, engine, seconds = self._staged, self._engine, dict[str, float]()

        @contextlib.asynccontextmanager
        async def phase(name: str, stage: str) -> AsyncIterator[None]:
            with self._clock.stage(stage, f"version {version}") as duration:
                try:
                    async with asyncio.timeout(phase_timeout_s):
                        yield
                except Exception as error:
                    late = f"not done within {phase_timeout_s:g} s (weight_sync.phase_timeout_s)"
                    why = str(error) or (late if isinstance(error, TimeoutError) else repr(error))
                    raise RuntimeError(f"phase `{name}`: {why}") from error
            seconds[name] = duration.seconds

        with self._clock.stage("pause") as paused:
            async with phase("pause", "pause"):
                await engine.pause()
            async with phase("load", "load_weights"):
                await engine.load()
            async with phase("finish", "finish_weights"):
                await engine.finish(version)
            self._version, self._staged = version, None
            async with phase("resume", "resume"):
                await engine.resume()
        return {**seconds, "paused": paused.seconds}

    async def sleep(self) -> None:
        """Free the device for the colocated Learner, once no group is running."""
        await self._endings.until(lambda: self._num_running == 0)
        self._asleep.enter_context(self._clock.stage("sleep"))
        await self._engine.sleep()

    async def wake(self) -> None:
        """Take the device back from the colocated Learner."""
        with self._asleep.pop_all():
            await self._engine.wake()

    async def shutdown(self) -> None:
        await self._engine.shutdown()
