"""Calls to many actors without holding up the event loop.

Sending a call to a Ray actor takes the caller about half a millisecond, so a thousand calls in one turn of the
event loop would delay everything else by half a second. All calls are under way at the same time nevertheless.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Iterable
from typing import TypeVar

T = TypeVar("T")
PER_TURN = 32  # calls begun per turn of the event loop


async def gathered(work: Iterable[Awaitable[T]]) -> list[T | BaseException]:
    """Begin all work, a few per turn; return every result in order, the errors among them.

    If this is cancelled, all that has begun is cancelled, and nothing more begins.
    """
    begun: list[asyncio.Future[T]] = []
    try:
        for each in work:
            begun.append(asyncio.ensure_future(each))
            await breathe(len(begun))
        return await asyncio.gather(*begun, return_exceptions=True)
    except BaseException:
        for task in begun:
            task.cancel()
        raise


class FanOut:
    """Turns of tasks that wake together to send a call each: `PER_TURN` go on per turn of the event loop."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def turn(self) -> None:
        """Wait for a turn of the event loop with room for one more; first come, first served."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._release, loop)
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _release(self, loop: asyncio.AbstractEventLoop) -> None:
        for _ in range(min(PER_TURN, len(self._waiting))):
            turn = self._waiting.popleft()
            if not turn.done():  # else it was cancelled
                turn.set_result(None)
        if self._waiting:
            loop.call_soon(self._release, loop)


async def breathe(num_begun: int) -> None:
    """Let others run after every `PER_TURN` calls."""
    if num_begun % PER_TURN == 0:
        await asyncio.sleep(0)
