"""Detection of stalls: when no call is answered for long, report the open calls and replace stuck actors."""

import asyncio

from grpo_ray.errors import Stalled
from grpo_ray.run.generator_pool import GeneratorPool
from grpo_ray.run.open_calls import OpenCalls
from grpo_ray.telemetry.run_log import RunLog


async def watch_for_stalls(calls: OpenCalls, pool: GeneratorPool, log: RunLog, limit_s: float) -> None:
    """Check for a stall until cancelled.

    Raises:
        Stalled: no call was answered for `limit_s`, and neither a Generator nor the Scorer is the cause.
    """
    while True:
        await asyncio.sleep(min(5.0, limit_s / 4))
        if calls.quiet_s >= limit_s:
            log.event("stalled", None, f"nothing has moved for {calls.quiet_s:.0f} s; the actors:")
            for line in calls.lines():
                log.event("waits", None, f"  {line}")
            log.display.warning(f"the Python stacks of the actors' processes are in {log.run.logs}/")
            pool.actors.dump_stacks()
            await _replace_stuck(set(calls.stuck(0.7 * limit_s)), pool, limit_s)
            calls.progress()


async def _replace_stuck(stuck: set[str], pool: GeneratorPool, limit_s: float) -> None:
    error = f"it has not answered for {limit_s:g} s (recovery.stall_timeout_s)"
    generators = stuck & set(pool.serving)
    for name in generators:
        pool.retire(name, error)
    if "scorer" in stuck:
        await pool.replace_scorer(pool.actors.scorer, error)
    if not generators and "scorer" not in stuck:
        raise Stalled(
            f"stuck for {limit_s:g} s: {', '.join(sorted(stuck)) or 'everything waits for the buffer'}"
        )
