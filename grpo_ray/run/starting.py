"""The start of an actor in place of one that failed."""

import asyncio

from grpo_ray.actors.clients import ActorClient
from grpo_ray.run.context import ServingContext


async def until_ready(client: ActorClient, context: ServingContext) -> None:
    """Wait for a fresh actor.

    Raises:
        TimeoutError: it did not start within `recovery.start_timeout_s`.
    """
    limit_s = context.config.recovery.start_timeout_s
    try:
        with context.calls.call(client.name, "starts", is_retry=True):
            async with asyncio.timeout(limit_s):
                await client.ready()
    except TimeoutError as error:
        text = f"{client.name} did not start within {limit_s:g} s (recovery.start_timeout_s)"
        raise TimeoutError(text) from error
