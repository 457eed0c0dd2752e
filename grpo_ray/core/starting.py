"""The start of all actors of a run, Generators in waves, and of an actor in place of one that failed."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from grpo_ray.core.clients import ActorClient
from grpo_ray.core.context import ServingContext
from grpo_ray.errors import Stalled
from grpo_ray.watch.clock import monotonic

NOTICE_S = 60.0  # without an actor that comes up, before the run names those that it waits for
REPORT_S = 10.0  # between two reports of the number of actors that are up


async def until_all_ready(context: ServingContext, ready: Callable[[ActorClient], Awaitable[object]]) -> None:
    """Wait for every actor, report how many are up, and after `NOTICE_S` which ones are not.

    At most `generator.max_starting` Generators start at the same time, and each one's time counts from then.

    Args:
        ready: waits for one actor.

    Raises:
        Stalled: an actor did not start within `recovery.start_timeout_s`.
    """
    log, limit_s = context.log, context.config.recovery.start_timeout_s
    turns = asyncio.Semaphore(context.config.generator.max_starting)
    began: dict[str, float] = {}  # seconds on the clock, by actor

    async def start(actor: ActorClient) -> None:
        async with AsyncExitStack() as turn:
            if actor.name in context.actors.generators:
                await turn.enter_async_context(turns)
            began[actor.name] = monotonic()
            await ready(actor)

    waits = {asyncio.ensure_future(start(each)): name for name, each in context.actors.by_name().items()}
    for wait in waits:  # an error of a second one is no news
        wait.add_done_callback(lambda done: done.cancelled() or done.exception())
    pending, moved_at = set(waits), monotonic()
    log.display.status("starting the actors")
    while pending:
        before, report_s = len(pending), min(REPORT_S, limit_s / 2)
        done, pending = await asyncio.wait(pending, timeout=report_s, return_when=asyncio.FIRST_EXCEPTION)
        for wait in done:
            wait.result()
        now = monotonic()
        moved_at = now if len(pending) < before else moved_at
        late = [waits[wait] for wait in pending if now - began.get(waits[wait], now) >= limit_s]
        if late:
            raise Stalled(f"{_listed(late)} did not start within {limit_s:g} s (recovery.start_timeout_s)")
        if pending:
            text = f"starting the actors: {len(waits) - len(pending)} of {len(waits)} are up"
            if now - moved_at >= min(NOTICE_S, limit_s / 2):
                names = _listed([waits[wait] for wait in pending if waits[wait] in began])
                text += f"; still waiting for {names} (is the cluster busy? see {log.run.logs})"
            log.display.status(text)


def _listed(names: list[str]) -> str:
    first = ", ".join(sorted(names)[:8])
    return f"{first} and {len(names) - 8} more" if names[8:] else first


async def until_ready(client: ActorClient, context: ServingContext) -> None:
    """Wait for a fresh actor; raises TimeoutError after `recovery.start_timeout_s`."""
    limit_s = context.config.recovery.start_timeout_s
    try:
        with context.calls.call(client.name, "starts", is_retry=True):
            async with asyncio.timeout(limit_s):
                await client.ready()
    except TimeoutError as error:
        text = f"{client.name} did not start within {limit_s:g} s (recovery.start_timeout_s)"
        raise TimeoutError(text) from error
