"""Metrics of the time between two steps: seconds per stage, tokens per second, and memory."""

from collections.abc import Mapping
from functools import partial

from grpo_ray.core.clients import ActorClient
from grpo_ray.core.context import RunContext
from grpo_ray.core.pool import GeneratorPool
from grpo_ray.watch.activity import Activity
from grpo_ray.watch.event_loop import LoopLag
from grpo_ray.watch.run_log import FAILURES, Metrics
from grpo_ray.watch.timeline import Timeline


class StepMetrics:
    """The metrics of one time window per step; call `begin` before the first step, then `take` after each."""

    def __init__(self, context: RunContext, pool: GeneratorPool) -> None:
        self._context, self._pool = context, pool
        self._activity, self._loop_lag = Activity(context.clock), LoopLag()
        self._timeline = Timeline(context.log.run.timeline_path, context.log.run.path.name)
        self._num_before = (0, 0)  # tokens before the current window: sampled, and looked up by Teachers

    async def begin(self) -> None:
        """Open the window of the first step."""
        await self._activity.read(self._serving)
        self._loop_lag.start()
        self._num_before = self._pool.num_sampled_tokens, self._pool.num_looked_up_tokens

    async def take(self, num_trained_tokens: float) -> Metrics:
        """Close the current window, draw it in the timeline, and return its metrics."""
        log, actors, pool = self._context.log, self._context.actors, self._pool
        window = await self._activity.read(self._serving)
        before, self._num_before = self._num_before, (pool.num_sampled_tokens, pool.num_looked_up_tokens)
        num_sampled, num_looked_up = (now - then for now, then in zip(self._num_before, before, strict=True))
        of_teachers = {"throughput/teacher_tokens_per_s": num_looked_up / window.seconds}
        spilled_bytes = actors.spilled_bytes()
        log.warning("spilling", _spilling(spilled_bytes))
        draw = partial(self._timeline.append, window.drawn)
        log.writer.submit("timeline.json", lambda: log.warning("timeline", draw()))
        return {
            **window.metrics(self._context.config.generator.num_generators),
            **self._loop_lag.take(),
            "timing/step_s": window.seconds,
            "throughput/sampled_tokens_per_s": num_sampled / window.seconds,
            **(of_teachers if actors.teachers else {}),
            "throughput/trained_tokens_per_s": num_trained_tokens / window.seconds,
            "memory/object_store_spilled_bytes": spilled_bytes,
        }

    def of_recovery(self) -> Metrics:
        """Return the groups retried since the last call, and the restarts and restores of the run."""
        log, pool = self._context.log, self._pool
        num_retried, pool.num_retried = pool.num_retried, 0
        return {
            "rollout/retried_groups": num_retried,
            "recovery/restarts": log.num_events(*FAILURES),
            "recovery/restores": log.num_events("restored"),
        }

    @property
    def _serving(self) -> Mapping[str, ActorClient]:
        """All actors, except Generators that are being replaced."""
        actors = self._context.actors
        replaced = actors.generators.keys() - self._pool.serving.keys()
        return {name: actor for name, actor in actors.by_name().items() if name not in replaced}


def _spilling(num_bytes: int) -> str | None:
    """Return a warning if anything was spilled: nothing is lost, but steps have to wait for the disk."""
    if not num_bytes:
        return None
    return (
        f"Ray's object store is full and has written {num_bytes / 2**30:.2f} GiB to disk; "
        "give it more memory (ray start --object-store-memory), or lower buffer.max_gib"
    )
