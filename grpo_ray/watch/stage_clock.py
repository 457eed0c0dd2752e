"""An actor's time by stage: exactly one stage at any moment, so that the stages add up to its wall time."""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from grpo_ray.watch.clock import monotonic, wall_time
from grpo_ray.watch.memory import resident_bytes

MAX_SPANS = 10_000  # kept between two readings; `grpo-ray evaluate` never reads


@dataclass(frozen=True)
class Span:
    """A bar in the timeline, in seconds since the epoch."""

    name: str
    start: float
    end: float
    label: str = ""


@dataclass(frozen=True)
class StageTimes:
    """A clock's record since it was last read, and its actor's memory; `seconds` adds up to `wall_s`."""

    wall_s: float
    seconds: dict[str, float]  # by stage
    turns: tuple[Span, ...] = ()  # consecutive stages without a gap; they add up to `seconds`
    spans: tuple[Span, ...] = ()  # spans that ended since; they may overlap
    resident_bytes: int = 0  # of the actor's process and its child processes


@dataclass
class Duration:
    """Duration of a block, set when the block ends; blocks overlap, so durations do not add up."""

    seconds: float = field(default=0.0, init=False)


class StageClock:
    """A clock that counts each moment for one stage, also where stages overlap, as in a Generator.

    Of the running stages the first in `stages` counts; if none is running, `rest`, which names what the
    actor then waits for.
    """

    def __init__(
        self, stages: Sequence[str], rest: str, now: Callable[[], float] = monotonic,
        on_turn: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        """Start with no stage running; `on_turn` is called with each new current stage."""
        self._order, self._rest, self._now, self._on_turn = tuple(stages), rest, now, on_turn
        self._epoch = wall_time() - now()
        self._lock = threading.Lock()  # checkpoints are written in another thread
        self._running: Counter[str] = Counter()
        self._labels: dict[str, str] = {}  # the newest label of each stage
        self._seconds = dict.fromkeys([*stages, rest], 0.0)
        self._turns: deque[Span] = deque(maxlen=MAX_SPANS)
        self._spans: deque[Span] = deque(maxlen=MAX_SPANS)
        self._turn = rest
        self._read_at = self._turn_began = now()

    @contextmanager
    def stage(self, stage: str, label: str = "") -> Iterator[Duration]:
        """Count the block as this stage; the timeline shows `label` with it."""
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
        """Show the block as a separate bar in the timeline, which may overlap others; it is not a stage."""
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
        """The stage that time is being counted for."""
        for stage in self._order:
            if self._running[stage]:
                return stage
        return self._rest

    def take(self, resident_bytes: int = 0) -> StageTimes:
        """Return the record since the last call, with the memory; running stages are counted up to now."""
        with self._lock:
            now = self._now()
            self._end_turn(now, self._turn)
            drawn = tuple(self._turns), tuple(self._spans)
            times = StageTimes(now - self._read_at, self._seconds, *drawn, resident_bytes)
            self._read_at, self._seconds = now, dict.fromkeys(self._seconds, 0.0)
            self._turns.clear()
            self._spans.clear()
            return times

    def _change(self, stage: str, number: int) -> float:
        with self._lock:
            now = self._now()
            self._running[stage] += number
            # Only the first block of a stage to begin, and the last to end, can change the turn.
            is_first_or_last = self._running[stage] == max(number, 0)
            if is_first_or_last and (current := self.current) != self._turn:
                self._end_turn(now, current)
                if self._on_turn is not None:
                    self._on_turn(current)
            return now

    def _end_turn(self, now: float, following: str) -> None:
        self._seconds[self._turn] += now - self._turn_began
        if now > self._turn_began:
            start, end = self._epoch + self._turn_began, self._epoch + now
            self._turns.append(Span(self._turn, start, end, self._labels.get(self._turn, "")))
        self._turn, self._turn_began = following, now


class ClockedActor:
    """The calls that every asynchronous actor answers, as `ActorClient` in core/clients.py has them."""

    _clock: StageClock
    _has_children = True  # child processes: their memory counts

    async def ready(self) -> bool:
        return True

    async def take_stats(self) -> StageTimes:
        return self._clock.take(resident_bytes(self._has_children))
