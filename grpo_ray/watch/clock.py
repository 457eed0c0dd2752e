"""The time, for everything that measures or waits in a run; a simulation puts a virtual clock in its place.

The functions may be bound early, as default arguments: each call asks for the current clock.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Clock(Protocol):
    """A clock that can stand in for the machine's."""

    def monotonic(self) -> float: ...
    def wall_time(self) -> float: ...


_simulated: Clock | None = None


def monotonic() -> float:
    """Return seconds that never go back, from an arbitrary start."""
    return time.monotonic() if _simulated is None else _simulated.monotonic()


def wall_time() -> float:
    """Return seconds since the epoch."""
    return time.time() if _simulated is None else _simulated.wall_time()


def is_simulated() -> bool:
    """Return whether time is virtual: all actors are then objects of this process, without threads."""
    return _simulated is not None


@contextmanager
def simulated_by(clock: Clock) -> Iterator[None]:
    """Read this clock instead of the machine's while the block lasts."""
    global _simulated
    assert _simulated is None, "a simulation runs already"
    _simulated = clock
    try:
        yield
    finally:
        _simulated = None
