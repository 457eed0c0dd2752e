"""Changes of a state that several tasks wait for."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Changes:
    """Changes of one state, in one event loop."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def announce(self) -> None:
        self._next.set()
        self._next = asyncio.Event()

    async def next(self) -> None:
        """Wait for the next change."""
        await self._next.wait()

    async def until(self, condition: Callable[[], T | None]) -> T:
        """Wait until the condition is true, and return its value; it is checked again after each change."""
        while not (value := condition()):
            await self.next()
        return value
