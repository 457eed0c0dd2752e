"""What an actor spends its time on: one stage at any moment, so that the stages add up to its wall time."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """One stage from its beginning to its end, in seconds since the epoch: a bar of the timeline."""

    stage: str
    start: float
    end: float
    label: str = ""


@dataclass(frozen=True)
class StageTimes:
    """What a clock saw since it was last read; `seconds` adds up to `wall_s`."""

    wall_s: float
    seconds: dict[str, float]
    spans: tuple[Span, ...]


class StageClock:
    """Takes turns: where stages overlap, as in a Generator that samples many groups, time goes to one of them.

    It goes to the first in `stages` that is going on; when none is, to `rest`: what the actor then waits for.
    """

    def __init__(self, stages: Sequence[str], rest: str, now: Callable[[], float] = time.perf_counter) -> None:
        self._order, self._rest, self._now = tuple(stages), rest, now
        self._epoch = time.time() - now()
        self._lock = threading.Lock()  # a checkpoint is written beside the training
        self._running: Counter[str] = Counter()
        self._seconds = dict.fromkeys([*stages, rest], 0.0)
        self._spans: list[Span] = []
        self._read_at = self._counted_to = now()

    @contextmanager
    def stage(self, stage: str, label: str = "") -> Iterator[None]:
        """The block is this stage; `label` says more of it in the timeline."""
        assert stage in self._order, f"{stage} is not among {self._order}"
        start = self._change(stage, +1)
        try:
            yield
        finally:
            end = self._change(stage, -1)
            self._spans.append(Span(stage, self._epoch + start, self._epoch + end, label))

    def _change(self, stage: str, number: int) -> float:
        with self._lock:
            now = self._count()
            self._running[stage] += number
            return now

    def _count(self) -> float:
        now = self._now()
        self._seconds[self.current] += now - self._counted_to
        self._counted_to = now
        return now

    @property
    def current(self) -> str:
        """The stage that time goes to now."""
        return next((stage for stage in self._order if self._running[stage]), self._rest)

    def take(self) -> StageTimes:
        """What happened since the last call; stages that go on are counted up to now."""
        with self._lock:
            now = self._count()
            times = StageTimes(now - self._read_at, self._seconds, tuple(self._spans))
            self._read_at, self._seconds, self._spans = now, dict.fromkeys(self._seconds, 0.0), []
            return times
