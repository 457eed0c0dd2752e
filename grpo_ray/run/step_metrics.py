"""What a step's line says of the time since the line before: where it went, tokens per second, and memory."""

import asyncio
from typing import Any

from grpo_ray.run.generator_pool import Rollouts
from grpo_ray.telemetry.activity import Activity
from grpo_ray.telemetry.run_log import Metrics, RunLog
from grpo_ray.telemetry.stage_clock import StageClock
from grpo_ray.telemetry.timeline import Timeline


class StepFigures:
    """`begin` before the first step, then `take` for every line."""

    def __init__(
        self, num_generators: int, rollouts: Rollouts, actors: Any, log: RunLog, clock: StageClock
    ) -> None:
        """`clock` is the driver's."""
        self._num_generators, self._rollouts, self._actors, self._log = num_generators, rollouts, actors, log
        self._activity = Activity(clock)
        self._timeline = Timeline(log.run.timeline_path, log.run.path.name)
        self._num_told_tokens = 0  # sampled before the newest line

    async def begin(self) -> None:
        """The first step's window begins."""
        await self._activity.read(self._serving)
        self._num_told_tokens = self._rollouts.num_sampled_tokens

    async def take(self, num_trained_tokens: float) -> Metrics:
        """The figures of the window that ends now; it is drawn in the timeline."""
        window = await self._activity.read(self._serving)
        num_tokens = self._rollouts.num_sampled_tokens
        num_sampled, self._num_told_tokens = num_tokens - self._num_told_tokens, num_tokens
        spilled_bytes = await asyncio.to_thread(self._actors.spilled_bytes)
        self._log.warning("spilling", _spilling(spilled_bytes))
        self._log.warning("timeline", await asyncio.to_thread(self._timeline.append, window.stages))
        return {
            **window.metrics(self._num_generators),
            "timing/step_s": window.seconds,
            "throughput/sampled_tokens_per_s": num_sampled / window.seconds,
            "throughput/trained_tokens_per_s": num_trained_tokens / window.seconds,
            "memory/object_store_spilled_bytes": spilled_bytes,
        }

    @property
    def _serving(self) -> dict[str, Any]:
        """Who can be asked what it did: all actors but Generators that are being replaced."""
        replaced = self._actors.generators.keys() - self._rollouts.serving.keys()
        return {name: actor for name, actor in self._actors.by_name().items() if name not in replaced}


def _spilling(num_bytes: int) -> str | None:
    """Nothing is lost by it, but every step waits for the disk."""
    if not num_bytes:
        return None
    return (
        f"Ray's object store is full and has written {num_bytes / 2**30:.2f} GiB to disk; "
        "give it more memory (ray start --object-store-memory), or lower buffer.max_gib"
    )
