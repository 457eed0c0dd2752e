"""The watch over a run's metrics: each detector warns once, and again only after its failure was gone."""

from collections import deque
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

from grpo_ray.config import Config
from grpo_ray.config.run import DetectorName
from grpo_ray.records.json_lines import parse_line
from grpo_ray.watch.detectors import DETECTORS, NUM_STEPS, RecentSteps, Row, Setup

KIND = "detected_"  # begins the kinds of their events
NUM_CLEAR_STEPS = 10  # without a finding; then the same detector may warn again


class Detection(NamedTuple):
    """A warning of one detector."""

    name: DetectorName
    step: int
    text: str  # ends with the address of the page that explains it

    @property
    def kind(self) -> str:
        """The kind of its event."""
        return f"{KIND}{self.name}"


class FailureWatch:
    """The detectors of one run; `step` takes the metrics of each step, in order."""

    def __init__(self, setup: Setup, silent: Iterable[DetectorName] = ()) -> None:
        self._setup = setup
        self._detectors = {name: d for name, d in DETECTORS.items() if name not in set(silent)}
        self._first: list[Row] = []
        self._latest: deque[Row] = deque(maxlen=NUM_STEPS)
        self._last_found: dict[DetectorName, int] = {}  # the newest step of each finding

    @classmethod
    def of_run(cls, config: Config, metrics_path: str | Path) -> "FailureWatch":
        """Return the watch as it was after the lines of the metrics file, of which it warned already."""
        watch = cls(Setup.of(config), config.run.silent_detectors)
        with Path(metrics_path).open("rb") if Path(metrics_path).exists() else nullcontext(()) as lines:
            for row in filter(None, map(parse_line, lines)):  # a damaged line is left out
                watch.step(int(row.get("step", 0)), row)
        return watch

    def step(self, step: int, metrics: Row) -> list[Detection]:
        """Take a step's metrics; return the warnings that are new. A metric that is missing is skipped."""
        (self._first if len(self._first) < NUM_STEPS else self._latest).append(dict(metrics))
        window = RecentSteps(self._setup, tuple(self._first), tuple(self._latest))
        found = []
        for name, detector in self._detectors.items():
            if text := detector.find(window):
                last = self._last_found.get(name)
                if last is None or step > last + NUM_CLEAR_STEPS:
                    found.append(Detection(name, step, f"{text}; see {detector.address}"))
                self._last_found[name] = step
        return found


def detections(config: Config, rows: Iterable[Row]) -> list[Detection]:
    """Return the warnings of a whole run from its rows of metrics, also of detectors that were silent in it."""
    watch = FailureWatch(Setup.of(config))
    return [found for row in rows for found in watch.step(row["step"], row)]


def is_detection(kind: str) -> bool:
    """Return True for an event that is a detector's warning."""
    return kind.startswith(KIND)
