"""When nothing moves: say who waits for what, and replace who is stuck."""

import asyncio
from typing import Any

from grpo_ray.errors import Stalled
from grpo_ray.run.generator_pool import Rollouts
from grpo_ray.run.open_calls import Watch
from grpo_ray.telemetry.run_log import RunLog


async def keep_watch(watch: Watch, rollouts: Rollouts, actors: Any, log: RunLog, limit_s: float) -> None:
    """Never returns.

    Raises:
        Stalled: nothing moved for `limit_s` and it is no Generator's or Scorer's doing.
    """
    while True:
        await asyncio.sleep(min(5.0, limit_s / 4))
        if watch.quiet_s >= limit_s:
            log.event("stalled", None, f"nothing has moved for {watch.quiet_s:.0f} s; the actors:")
            for line in watch.lines():
                log.event("waits", None, f"  {line}")
            log.display.warning(f"the Python stacks of the actors' processes are in {log.run.logs}/")
            actors.dump_stacks()
            await _act(set(watch.stuck(0.7 * limit_s)), rollouts, limit_s)
            watch.progress()


async def _act(stuck: set[str], rollouts: Rollouts, limit_s: float) -> None:
    error = f"it has not answered for {limit_s:g} s (recovery.stall_timeout_s)"
    generators = stuck & set(rollouts.serving)
    for name in generators:
        rollouts.report(name, error)
    if "scorer" in stuck:
        await rollouts.replace_scorer(rollouts.scorer, error)
    if not generators and "scorer" not in stuck:
        raise Stalled(
            f"stuck for {limit_s:g} s: {', '.join(sorted(stuck)) or 'everything waits for the buffer'}"
        )
