"""An event loop with a virtual clock: whenever nothing is ready, the clock jumps to the next timer.

Hours of waiting take no time, and the order of events depends on nothing but the timers. Work in an executor
(`asyncio.to_thread`) runs at once, in no virtual time, because a thread would end at a moment of real time.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """The end of a simulation in which every task waits for another."""


class VirtualClock:
    """Seconds since the simulation began; it continues from one event loop to the next, as after a restore."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        """Return the virtual seconds so far; the wall time is the same, as if they had begun with the epoch."""
        return self.now

    wall_time = monotonic

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run `main` on a new event loop that follows this clock, as `asyncio.run` would."""
        with asyncio.Runner(loop_factory=lambda: VirtualLoop(self)) as runner:
            return runner.run(main)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that never waits: see the module."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(_Jump(clock))
        self._virtual_clock = clock

    def time(self) -> float:
        return self._virtual_clock.now

    def run_in_executor(  # type: ignore[override]  # the base class names a type variable of its own
        self, executor: object, func: Callable[..., T], *args: Any
    ) -> "asyncio.Future[T]":
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


class _Jump(selectors.SelectSelector):
    """A selector that moves the clock instead of waiting; no file is ever waited for."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock(f"after {self._clock.now:.1f} virtual seconds every task waits for another")
        self._clock.now += max(0.0, timeout)
        return []
