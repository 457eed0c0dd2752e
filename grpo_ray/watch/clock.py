"""The time, for everything that measures or waits in a run, and the virtual clock of a simulation.

The functions may be bound early, as default arguments: each call asks for the current clock.
"""

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


_simulated: "VirtualClock | None" = None


def monotonic() -> float:
    """Return seconds that never go back, from an arbitrary start."""
    return time.monotonic() if _simulated is None else _simulated.now


def wall_time() -> float:
    """Return seconds since the epoch, with which a simulation begins."""
    return time.time() if _simulated is None else _simulated.now


def is_simulated() -> bool:
    """Return whether time is virtual: all actors are then objects of this process, without threads."""
    return _simulated is not None


@contextmanager
def simulated_by(clock: "VirtualClock") -> Iterator[None]:
    """Read this clock instead of the machine's while the block lasts."""
    global _simulated
    assert _simulated is None, "a simulation runs already"
    _simulated = clock
    try:
        yield
    finally:
        _simulated = None


class Deadlock(RuntimeError):
    """The end of a simulation in which every task waits for another."""


class VirtualClock:
    """Seconds since the simulation began; it continues from one event loop to the next, as after a restore."""

    def __init__(self) -> None:
        self.now = 0.0

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run `main` on a new event loop that follows this clock, as `asyncio.run` would."""
        with asyncio.Runner(loop_factory=lambda: VirtualLoop(self)) as runner:
            return runner.run(main)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that jumps to the next timer whenever nothing is ready.

    The order of events depends on nothing but the timers. Work in an executor (`asyncio.to_thread`) runs at
    once, in no virtual time, because a thread would end at a moment of real time.
    """

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
