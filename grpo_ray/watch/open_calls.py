"""The calls that actors have not answered yet, so that a stalled run can report its cause."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from grpo_ray.watch.clock import monotonic
from grpo_ray.watch.run_state import ActorState


@dataclass(frozen=True)
class OpenCall:
    """A call that has not been answered."""

    actor: str
    what: str
    since: float  # seconds on the clock
    is_waiting: bool  # for other actors, like a buffer for its groups; never the cause of a stall


class OpenCalls:
    """The run's open calls. Every answer counts as progress; a long time without one is a stall."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._ids = itertools.count()
        self._open: dict[int, OpenCall] = {}
        self._last_progress = clock()

    @contextlib.contextmanager
    def call(self, actor: str, what: str, is_waiting: bool = False, is_retry: bool = False) -> Iterator[None]:
        """Record a call for as long as the block lasts; leaving the block without an error is progress.

        Args:
            is_retry: work that has been done before; its end is no progress, because it may fail for ever.
        """
        number = next(self._ids)
        self._open[number] = OpenCall(actor, what, self._clock(), is_waiting)
        try:
            yield
            if not is_retry:
                self.progress()
        finally:
            del self._open[number]

    def progress(self) -> None:
        """Restart the measurement of `quiet_s`."""
        self._last_progress = self._clock()

    @property
    def quiet_s(self) -> float:
        """Seconds since the last progress."""
        return self._clock() - self._last_progress

    def stuck(self, older_than_s: float) -> list[str]:
        """Return the actors that have worked on one call for that long without waiting for other actors."""
        limit = self._clock() - older_than_s
        return sorted({c.actor for c in self._open.values() if c.since <= limit and not c.is_waiting})

    def states(self, names: Iterable[str]) -> tuple[ActorState, ...]:
        """Return what each actor does now: its oldest open call. Safe to call from another thread."""
        calls: dict[str, list[OpenCall]] = {}
        for call in sorted(self._open.values(), key=lambda call: call.since):
            calls.setdefault(call.actor, []).append(call)
        return tuple(  # a rank of the Learner has the Learner's calls
            self._state(name, calls.get(name) or calls.get(name.partition("-")[0], [])) for name in names
        )

    def _state(self, name: str, calls: list[OpenCall]) -> ActorState:
        if not calls:
            return ActorState(name=name)
        first, for_s = calls[0], self._clock() - calls[0].since
        return ActorState(
            name=name, doing=first.what, for_s=for_s, num_calls=len(calls), is_waiting=first.is_waiting
        )

    def lines(self) -> list[str]:
        """Return one line per actor: its oldest open call, and how many more are open."""
        return [
            f"{state.name}: {state.doing} for {state.for_s:.0f} s"
            + (f" (and {state.num_calls - 1} more calls)" if state.num_calls > 1 else "")
            for state in self.states(sorted({call.actor for call in self._open.values()}))
        ]
