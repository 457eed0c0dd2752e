"""Generator: an engine that samples groups and loads new weights."""

import asyncio
from contextlib import ExitStack

from grpo_ray.actors.clients import bulk_and_facts
from grpo_ray.engines.base import Engine
from grpo_ray.engines.snapshot import check_snapshot
from grpo_ray.telemetry.memory import resident_bytes
from grpo_ray.telemetry.stage_clock import ActorStats, StageClock
from grpo_ray.types import PromptItem, RolloutGroup, SamplingSettings, WeightSnapshot

STAGES = ("start", "load_weights", "resume", "pause", "sleep", "generate")


class Generator:
    """An engine as an actor. It samples every group on arrival: admission decides when one is dispatched."""

    def __init__(self, name: str, engine: Engine, slowdown_s: float = 0.0, version: int = 0) -> None:
        """
        Args:
            version: the version of the weights that the engine has loaded.
        """
        self.name = name
        self._engine = engine
        self._slowdown_s = slowdown_s
        self._version = version
        self._num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._clock = StageClock(STAGES, rest="wait_for_prompts")
        self._paused, self._asleep = ExitStack(), ExitStack()  # stages that last from one call to another

    def __repr__(self) -> str:
        doing = f"{self._clock.current}, {self._num_running} groups running"
        return f"Generator({self.name}, version={self._version}, {doing})"

    async def ready(self) -> bool:
        """Start the engine; return once it serves its first version."""
        with self._clock.stage("start"):
            await self._engine.start(self._version)
        return True

    @bulk_and_facts
    async def generate(self, item: PromptItem, settings: SamplingSettings) -> tuple[RolloutGroup, int]:
        """Sample the item's completions; return them, and their number of tokens.

        Many calls run concurrently; cancelling one aborts its requests.
        """
        self._enter()
        label = f"group {item.group_id}, {settings.num_samples} samples, started at version {self._version}"
        try:
            with self._clock.stage("generate"), self._clock.span("rollout", label):
                completions = await self._engine.generate(item.prompt_token_ids, settings)
                if self._slowdown_s:
                    await asyncio.sleep(self._slowdown_s)
            num_tokens = sum(len(completion.token_ids) for completion in completions)
            return RolloutGroup(item, completions, self.name), num_tokens
        finally:
            self._leave()

    async def pause(self) -> None:
        """Stop sampling until `resume`; requests in flight are kept."""
        self._paused.enter_context(self._clock.stage("pause"))
        await self._engine.pause()

    async def load_weights(self, snapshot: WeightSnapshot) -> None:
        """Load all tensors, then set the version, so that a partial update is never served as a new version.

        Raises:
            ValueError: the snapshot did not arrive complete, or does not fit the model.
        """
        with self._clock.stage("load_weights", f"version {snapshot.version}"):
            check_snapshot(snapshot)
            await self._engine.start_weight_update()
            await self._engine.update_weights(snapshot)
            await self._engine.finish_weight_update(snapshot.version)
        self._version = snapshot.version

    async def resume(self) -> None:
        """Continue sampling, on the loaded weights alone."""
        with self._paused.pop_all(), self._clock.stage("resume"):
            await self._engine.reset_prefix_cache()
            await self._engine.resume()

    async def sleep(self) -> None:
        """Free the device for the colocated Learner, once no group is running."""
        await self._idle.wait()
        self._asleep.enter_context(self._clock.stage("sleep"))
        await self._engine.sleep()

    async def wake(self) -> None:
        """Take the device back from the colocated Learner."""
        with self._asleep.pop_all():
            await self._engine.wake()

    async def take_stats(self) -> ActorStats:
        """Return the stage times since the last call, and the process's memory."""
        return ActorStats(self._clock.take(), resident_bytes())

    async def shutdown(self) -> None:
        await self._engine.shutdown()

    def _enter(self) -> None:
        self._num_running += 1
        self._idle.clear()

    def _leave(self) -> None:
        self._num_running -= 1
        if self._num_running == 0:
            self._idle.set()
