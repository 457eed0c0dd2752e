"""A run's log: metrics of each step, events, and warnings, which are repeated until their cause is gone."""

import time
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from grpo_ray.telemetry.evaluation_summary import EvaluationSummary
from grpo_ray.telemetry.run_files import JsonLines, MetricsLog, RunDirectory, read_metrics
from grpo_ray.telemetry.trackers import NO_TRACKERS, Trackers
from grpo_ray.types import ScoredGroup

Metrics = dict[str, float]  # by name; the catalog is metrics_catalog.py


class Display(Protocol):
    """The user's view of the run: a console, or something that wraps one."""

    def status(self, text: str) -> None: ...
    def step(self, step: int, metrics: Metrics) -> None: ...
    def evaluation(self, summary: EvaluationSummary) -> None: ...
    def warning(self, text: str) -> None: ...


class RunLog:
    """`metrics.jsonl`, `events.jsonl`, the display and the trackers.

    A warning, for example of a full disk, is shown after every step until it is cleared; training continues.
    """

    def __init__(self, run: RunDirectory, display: Display, trackers: Trackers = NO_TRACKERS) -> None:
        self.run, self.display, self._trackers = run, display, trackers
        self._metrics = MetricsLog(run.metrics_path)
        self._events = JsonLines(run.events_path)
        events = read_metrics(run.events_path) if run.events_path.exists() else []
        self._num_events = Counter(event["kind"] for event in events)
        self._warnings: dict[str, str | None] = {}
        self.step = 0  # the last trained step

    def line(self, step: int, metrics: Metrics) -> None:
        """Write the step's line."""
        self.warning("metrics", self._metrics.append(step, metrics))
        self._trackers.step(step, metrics)

    def evaluation(self, summary: EvaluationSummary, groups: Sequence[ScoredGroup]) -> None:
        """Show a validation and send it to the trackers."""
        self.display.evaluation(summary)
        self._trackers.evaluation(summary, groups)

    def warning(self, topic: str, text: str | None) -> None:
        """Set the topic's warning, which is shown after each step; None clears it."""
        self._warnings[topic] = text

    def unwritten(self) -> str | None:
        """Return why records of the steps so far are not on disk; a checkpoint has to wait for them."""
        topics = ("metrics", "evaluations", "rollouts")
        return next(filter(None, (self._warnings.get(topic) for topic in topics)), None)

    def flush(self) -> None:
        """Retry pending writes: no later write may come that would retry them."""
        self.warning("metrics", self._metrics.flush())
        self.warning("events", self._events.flush())

    def show_warnings(self) -> None:
        """Show every warning that is not cleared, after retrying what is pending."""
        self.flush()
        for text in self._trackers.take_failures():
            self.event("tracker_off", None, text)
        self.warning("trackers", self._trackers.problem())
        for text in filter(None, self._warnings.values()):
            self.display.warning(text)

    def event(self, kind: str, actor: str | None, text: str, **facts: float) -> None:
        """Record an unusual event in events.jsonl and show it."""
        self._num_events[kind] += 1
        row = {"time": time.time(), "kind": kind, "actor": actor, "step": self.step, "text": text, **facts}
        self.warning("events", self._events.append(row))
        self.display.warning(text if actor is None or text.startswith(actor) else f"{actor}: {text}")

    def num_events(self, *kinds: str) -> int:
        """Return the number of events of these kinds since the run began, including earlier processes."""
        return sum(self._num_events[kind] for kind in kinds)
