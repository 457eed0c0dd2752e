"""The time in which Generators serve: the limits of episodes do not count the time in which none does."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from grpo_ray.watch.clock import monotonic

T = TypeVar("T")
LOOK_S = 1.0  # between two looks at a clock that stands still


class ServingTime:
    """A clock that stands still while no Generator serves, since episodes can do nothing about that.

    A TurnLink has one, too: of the time in which a Generator has turns.
    """

    def __init__(self, is_serving: bool = True, now: Callable[[], float] = monotonic) -> None:
        self._now = now
        self._seconds = 0.0
        self._since = now() if is_serving else None

    @property
    def seconds(self) -> float:
        """Seconds in which a Generator has served so far."""
        return self._seconds + (0.0 if self._since is None else self._now() - self._since)

    def set(self, is_serving: bool) -> None:
        """Let the clock run from now on, or stop it."""
        self._seconds, self._since = self.seconds, self._now() if is_serving else None

    async def wait(self, work: "asyncio.Future[Any]", limit_s: float) -> bool:
        """Wait until the work is done, for at most `limit_s` on this clock; return True if it is done."""
        end = self.seconds + limit_s
        while not work.done() and (left_s := end - self.seconds) > 0:
            await asyncio.wait({work}, timeout=left_s if self._since is not None else max(left_s, LOOK_S))
        return work.done()

    async def within(self, limit_s: float, work: Awaitable[T]) -> T:
        """Return the result of the work, which is cancelled at the limit, or with the caller.

        Raises:
            TimeoutError: it was not done within `limit_s` on this clock.
        """
        working = asyncio.ensure_future(work)
        try:
            if not await self.wait(working, limit_s):
                raise TimeoutError
            return working.result()
        finally:
            working.cancel()
