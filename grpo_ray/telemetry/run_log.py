"""What a run writes down and says while it goes on: a line a step, events, troubles until they are mended."""

import time
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from grpo_ray.telemetry.evaluation_summary import EvaluationSummary
from grpo_ray.telemetry.run_files import JsonLines, MetricsLog, RunDirectory, read_metrics
from grpo_ray.telemetry.trackers import NO_TRACKERS, Trackers
from grpo_ray.types import ScoredGroup

Metrics = dict[str, float]


class Display(Protocol):
    """What a person sees of the run."""

    def status(self, text: str) -> None: ...
    def step(self, step: int, metrics: Metrics) -> None: ...
    def evaluation(self, summary: EvaluationSummary) -> None: ...
    def trouble(self, text: str) -> None: ...


class RunLog:
    """`metrics.jsonl`, `events.jsonl`, the display and the trackers.

    A trouble, such as a full disk, is shown after every step until it is mended; training goes on.
    """

    def __init__(self, run: RunDirectory, display: Display, trackers: Trackers = NO_TRACKERS) -> None:
        self.run, self.display, self._trackers = run, display, trackers
        self._metrics = MetricsLog(run.metrics_path)
        self._events = JsonLines(run.events_path)
        events = read_metrics(run.events_path) if run.events_path.exists() else []
        self._num_events = Counter(event["kind"] for event in events)
        self._troubles: dict[str, str | None] = {}
        self.step = 0  # the newest trained step

    def line(self, step: int, metrics: Metrics) -> None:
        """Write the step's line."""
        self.trouble("metrics", self._metrics.append(step, metrics))
        self._trackers.step(step, metrics)

    def evaluation(self, summary: EvaluationSummary, groups: Sequence[ScoredGroup]) -> None:
        """Tell of a validation."""
        self.display.evaluation(summary)
        self._trackers.evaluation(summary, groups)

    def trouble(self, what: str, text: str | None) -> None:
        """Something that cannot be written (None: it could), to be shown after each step."""
        self._troubles[what] = text

    def unwritten(self) -> str | None:
        """Why records of the steps so far are not on the disk: a checkpoint must not say they are done."""
        files = ("metrics", "evaluations", "rollouts")
        return next(filter(None, (self._troubles.get(what) for what in files)), None)

    def flush(self) -> None:
        """Try again to write what waits: nothing may happen any more that would."""
        self.trouble("metrics", self._metrics.flush())
        self.trouble("events", self._events.flush())

    def show_troubles(self) -> None:
        self.flush()
        for text in self._trackers.take_failures():
            self.event("tracker_off", None, text)
        self.trouble("trackers", self._trackers.problem())
        for text in filter(None, self._troubles.values()):
            self.display.trouble(text)

    def event(self, kind: str, actor: str | None, text: str, **facts: float) -> None:
        """Something out of the ordinary: into events.jsonl, and to whoever looks on."""
        self._num_events[kind] += 1
        row = {"time": time.time(), "kind": kind, "actor": actor, "step": self.step, "text": text, **facts}
        self.trouble("events", self._events.append(row))
        self.display.trouble(text if actor is None or text.startswith(actor) else f"{actor}: {text}")

    def num_events(self, *kinds: str) -> int:
        """Events of these kinds since the run began, in this process and before."""
        return sum(self._num_events[kind] for kind in kinds)
