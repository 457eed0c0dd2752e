"""A run's log: metrics of each step, events, and warnings, which are repeated until their cause is gone."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from grpo_ray.errors import RunError
from grpo_ray.records.durable import replacing, sync_files
from grpo_ray.records.evaluation_summary import EvaluationSummary
from grpo_ray.records.json_lines import JsonLines, drop_half_line, parse_line
from grpo_ray.records.run_files import RunDirectory, last_row
from grpo_ray.records.visible_text import told
from grpo_ray.types import ScoredGroup, Ungraded
from grpo_ray.watch.background import BackgroundThread
from grpo_ray.watch.clock import wall_time
from grpo_ray.watch.detectors import FailureWatch
from grpo_ray.watch.trackers import NO_TRACKERS, Trackers

CLOSE_S = 10.0  # a disk that hangs delays the end of a run no longer
# After these the actor is replaced.
FAILURES = "generator_failed", "scorer_failed", "teacher_failed", "environment_failed"
OWN, MAX_OWN_NAMES = "episodes/metrics/", 256  # of metrics that episodes return, per run
Metrics = dict[str, float]  # by name; the catalog is metrics_catalog.py


class Display(Protocol):
    """The user's view of the run: a console, or something that wraps one."""

    def status(self, text: str) -> None: ...
    def step(self, step: int, metrics: Metrics) -> None: ...
    def evaluation(self, summary: EvaluationSummary) -> None: ...
    def warning(self, text: str) -> None: ...


class RunLog:
    """`metrics.jsonl`, `events.jsonl`, the display and the trackers.

    Files are written by a thread, in the order of the calls, so that a disk that hangs stops nothing else.
    A warning, for example of a full disk, is shown after every step until it is cleared; training continues.
    """

    def __init__(
        self, run: RunDirectory, display: Display, trackers: Trackers = NO_TRACKERS,
        failures: FailureWatch | None = None,
    ) -> None:  # fmt: skip
        self.run, self.display, self._trackers, self._failures = run, display, trackers, failures
        self.writer = BackgroundThread("records")
        self._num_events, num_damaged = _count_kinds(run.events_path)
        self._metrics = JsonLines(run.metrics_path)
        self._events = JsonLines(run.events_path)
        self._warnings: dict[str, str | None] = {}
        self._taken: RunError | None = None  # why nothing may be written any more
        self.step = 0  # the last trained step
        before = last_row(run.metrics_path)  # when the log was opened
        self.last_logged_step = int(before.get("step", 0))
        self._own_names = {name for name in before if name.startswith(OWN)}
        self.ungraded: dict[int, Ungraded] = {}  # by step, until its line is written
        if num_damaged:
            display.warning(f"{run.events_path}: {num_damaged} damaged lines are removed")

    def line(self, step: int, metrics: Metrics) -> None:
        """Write the step's line, and report the failures that detectors see in it."""

        def write() -> None:
            try:
                self.run.check_lock()
            except RunError as error:
                self._taken = error
                return
            self.warning("metrics", self._metrics.append({"step": step, **metrics}))
            self._trackers.step(step, metrics)

        self.writer.submit(f"the line of step {step}", write)
        ungraded = self.ungraded.pop(step, None)
        for found in self._failures.step(step, metrics) if self._failures is not None else ():
            example = f"\n{ungraded.example}" if ungraded and found.name == "reward_errors" else ""
            self.event(found.kind, None, f"step {step}: {found.text}{example}", step=step)

    def bounded(self, metrics: Metrics) -> Metrics:
        """Return the metrics without those of episodes beyond the first MAX_OWN_NAMES names of the run."""
        new = [name for name in metrics if name.startswith(OWN) and name not in self._own_names]
        room = max(0, MAX_OWN_NAMES - len(self._own_names))
        self._own_names.update(new[:room])
        left_out = dict.fromkeys(new[room:])
        if left_out and not self._num_events["metrics_left_out"]:
            text = (
                f"episodes have returned metrics of more than {MAX_OWN_NAMES} names; {new[room]} and "
                "all later ones are only in the rollouts: return few names, and put what varies into values"
            )
            self.event("metrics_left_out", None, text)
        return {name: value for name, value in metrics.items() if name not in left_out}

    def evaluation(self, summary: EvaluationSummary, groups: Sequence[ScoredGroup]) -> None:
        """Show a validation and send it to the trackers."""
        self.display.evaluation(summary)
        # Through the thread, because a tracker wants the steps in order.
        self.writer.submit("a validation", lambda: self._trackers.evaluation(summary, groups))

    def warning(self, topic: str, text: str | None) -> None:
        """Set the topic's warning, which is shown after each step; None clears it. Any thread may call this."""
        self._warnings[topic] = text

    def unwritten(self) -> str | None:
        """Return why records of the steps so far are not on disk; a checkpoint has to wait for them."""
        topics = ("metrics", "evaluations", "rollouts", "records")
        return next(filter(None, (self._warnings.get(topic) for topic in topics)), None)

    async def on_disk(self) -> str | None:
        """Wait until the records so far would survive a power cut; return why they would not."""
        await self.writer.run("the records before a checkpoint", self._sync)
        return self.unwritten()

    def _sync(self) -> None:
        self._flush()
        try:
            sync_files((self.run.metrics_path, self.run.events_path, self.run.evaluations_summary_path))
            self.warning("records", None)
        except OSError as error:
            self.warning("records", f"{self.run.path}: {error}")

    def _flush(self) -> None:
        """Retry pending writes: no later write may come that would retry them."""
        if self._taken is None:
            self.warning("metrics", self._metrics.flush())
            self.warning("events", self._events.flush())

    def show_warnings(self) -> None:
        """Show the warnings that stand, retry what is pending; raise RunError if the folder is taken."""
        if self._taken is not None:
            raise self._taken
        self.writer.submit("pending records", self._flush)
        for text in self._trackers.take_failures():
            self.event("tracker_off", None, text)
        self.warning("trackers", self._trackers.problem())
        self.warning("slow", self.writer.problem())
        for text in filter(None, list(self._warnings.values())):
            self.display.warning(text)

    def event(self, kind: str, actor: str | None, text: str, **facts: float) -> None:
        """Record an unusual event in events.jsonl and show it."""
        self._num_events[kind] += 1
        row = {"time": wall_time(), "kind": kind, "actor": actor, "step": self.step, "text": text, **facts}
        if self._taken is None:  # else the file is another run's
            self.writer.submit("an event", lambda: self.warning("events", self._events.append(row)))
        self.display.warning(told(actor, text))

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Wait for the records that are still to be written, but not for a disk that hangs."""
        if not self.writer.close(limit_s):
            self.display.warning(f"{self.run.path}: the last records are not written, because the disk hangs")

    def num_events(self, *kinds: str) -> int:
        """Return the number of events of these kinds since the run began, including earlier processes."""
        return sum(self._num_events[kind] for kind in kinds)


def _count_kinds(path: Path) -> tuple[Counter[str], int]:
    """Count the events of each kind; remove damaged lines, on which nothing depends, and count those."""
    drop_half_line(path)
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    kinds = [str((parse_line(line) or {}).get("kind", "")) for line in lines]
    whole = [line for line, kind in zip(lines, kinds, strict=True) if kind]
    if len(whole) < len(lines):
        with replacing(path) as partial:
            partial.write_bytes(b"".join(whole))
    return Counter(filter(None, kinds)), len(lines) - len(whole)
