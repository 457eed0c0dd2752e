"""Changes of a state that several tasks wait for."""

import asyncio

from grpo_ray.watch.event_loop import Changes


async def test_a_change_is_not_missed_by_a_wait_that_has_not_begun() -> None:
    changes = Changes()
    waiting = asyncio.ensure_future(changes.next())
    changes.announce()  # the task begins only now
    await asyncio.wait_for(waiting, 60)
