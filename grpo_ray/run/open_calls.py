"""What every actor is asked to do and since when, so that a run that stands still can say why."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class OpenCall:
    """A call that has not been answered."""

    actor: str
    what: str
    since: float  # the clock's seconds
    is_waiting: bool  # for others, as a buffer for its groups: never to blame


class Watch:
    """The run's open calls. Every answer is progress; none for long is a stall."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ids = itertools.count()
        self._open: dict[int, OpenCall] = {}
        self._last_progress = clock()

    @contextlib.contextmanager
    def call(self, actor: str, what: str, is_waiting: bool = False) -> Iterator[None]:
        """Around a call; leaving without an error is progress."""
        number = next(self._ids)
        self._open[number] = OpenCall(actor, what, self._clock(), is_waiting)
        try:
            yield
            self.progress()
        finally:
            del self._open[number]

    def progress(self) -> None:
        self._last_progress = self._clock()

    @property
    def quiet_s(self) -> float:
        """Seconds since anything moved."""
        return self._clock() - self._last_progress

    def stuck(self, older_than_s: float) -> list[str]:
        """Actors that have worked on one call for so long, waiting for nobody."""
        limit = self._clock() - older_than_s
        return sorted({c.actor for c in self._open.values() if c.since <= limit and not c.is_waiting})

    def by_actor(self) -> dict[str, list[OpenCall]]:
        """Each actor's open calls, oldest first; another thread may ask."""
        calls: dict[str, list[OpenCall]] = {}
        for call in sorted(self._open.values(), key=lambda call: call.since):
            calls.setdefault(call.actor, []).append(call)
        return calls

    def age_s(self, call: OpenCall) -> float:
        return self._clock() - call.since

    def lines(self) -> list[str]:
        """One line an actor: what it has been doing longest, and how many more calls are open."""
        return [
            f"{actor}: {calls[0].what} for {self.age_s(calls[0]):.0f} s"
            + (f" (and {len(calls) - 1} more calls)" if len(calls) > 1 else "")
            for actor, calls in sorted(self.by_actor().items())
        ]
