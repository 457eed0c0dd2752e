"""Changes of a state that several tasks wait for."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Changes:
    """Changes of one state, in one event loop."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def announce(self) -> None:
        self._next.set()
        self._next = asyncio.Event()

    def next(self) -> Coroutine[Any, Any, object]:
        """Return the wait for the next change after this call, however late the wait begins."""
        return self._next.wait()

    async def until(self, condition: Callable[[], T | None]) -> T:
        """Wait until the condition is true, and return its value; it is checked again after each change."""
        while not (value := condition()):
            await self.next()
        return value
