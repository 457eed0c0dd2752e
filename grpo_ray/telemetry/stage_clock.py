"""What an actor spends its time on: one stage at any moment, so that the stages add up to its wall time."""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

MAX_SPANS = 10_000  # kept between two readings: in an evaluation nobody reads


@dataclass(frozen=True)
class Span:
    """A bar of the timeline, in seconds since the epoch."""

    name: str
    start: float
    end: float
    label: str = ""


@dataclass(frozen=True)
class StageTimes:
    """What a clock saw since it was last read; `seconds` adds up to `wall_s`."""

    wall_s: float
    seconds: dict[str, float]  # by stage
    turns: tuple[Span, ...] = ()  # the stages one after another, without a gap: they add up to `seconds`
    spans: tuple[Span, ...] = ()  # what ended meanwhile of that which may overlap


@dataclass
class Duration:
    """How long a block took, once it has ended; blocks overlap, so that these do not add up."""

    seconds: float = field(default=0.0, init=False)


class StageClock:
    """Takes turns: where stages overlap, as in a Generator that samples many groups, time goes to one of them.

    It goes to the first in `stages` that is going on; when none is, to `rest`: what the actor then waits for.
    """

    def __init__(
        self,
        stages: Sequence[str],
        rest: str,
        now: Callable[[], float] = time.perf_counter,
        on_turn: Callable[[str], None] | None = None,
    ) -> None:
        """`on_turn` is told each stage that time begins to go to."""
        self._order, self._rest, self._now, self._on_turn = tuple(stages), rest, now, on_turn
        self._epoch = time.time() - now()
        self._lock = threading.Lock()  # a checkpoint is written beside the training
        self._running: Counter[str] = Counter()
        self._labels: dict[str, str] = {}  # the newest of each stage
        self._seconds = dict.fromkeys([*stages, rest], 0.0)
        self._turns: deque[Span] = deque(maxlen=MAX_SPANS)
        self._spans: deque[Span] = deque(maxlen=MAX_SPANS)
        self._turn = rest
        self._read_at = self._counted_to = self._turn_began = now()

    @contextmanager
    def stage(self, stage: str, label: str = "") -> Iterator[Duration]:
        """The block is this stage; `label` says more of it in the timeline."""
        assert stage in self._order, f"{stage} is not among {self._order}"
        duration = Duration()
        self._labels[stage] = label
        started = self._change(stage, +1)
        try:
            yield duration
        finally:
            duration.seconds = self._change(stage, -1) - started

    @contextmanager
    def span(self, name: str, label: str = "") -> Iterator[Duration]:
        """The block is a bar of its own in the timeline, which others may overlap; it is no stage."""
        duration, start = Duration(), self._now()
        try:
            yield duration
        finally:
            end = self._now()
            duration.seconds = end - start
            with self._lock:
                self._spans.append(Span(name, self._epoch + start, self._epoch + end, label))

    @property
    def current(self) -> str:
        """The stage that time goes to now."""
        return next((stage for stage in self._order if self._running[stage]), self._rest)

    def take(self) -> StageTimes:
        """What happened since the last call; stages that go on are counted up to now."""
        with self._lock:
            now = self._count()
            self._end_turn(now)
            times = StageTimes(now - self._read_at, self._seconds, tuple(self._turns), tuple(self._spans))
            self._read_at, self._seconds = now, dict.fromkeys(self._seconds, 0.0)
            self._turns.clear()
            self._spans.clear()
            return times

    def _change(self, stage: str, number: int) -> float:
        with self._lock:
            now = self._count()
            self._running[stage] += number
            if self.current != self._turn:
                self._end_turn(now)
                if self._on_turn is not None:
                    self._on_turn(self._turn)
            return now

    def _count(self) -> float:
        now = self._now()
        self._seconds[self._turn] += now - self._counted_to
        self._counted_to = now
        return now

    def _end_turn(self, now: float) -> None:
        if now > self._turn_began:
            start, end = self._epoch + self._turn_began, self._epoch + now
            self._turns.append(Span(self._turn, start, end, self._labels.get(self._turn, "")))
        self._turn, self._turn_began = self.current, now


@dataclass(frozen=True)
class ActorStats:
    """What an actor did since it was last asked, and what memory it has."""

    stages: StageTimes
    resident_bytes: int  # of its process and those that it started
