"""The outcome of a run, read from its own files."""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from typing import Any, Literal

import pyarrow as pa

from grpo_ray.records.checkpoint import CheckpointStore
from grpo_ray.records.json_lines import StepLines
from grpo_ray.records.rollout_log import log_table
from grpo_ray.tools.experiments.experiment_plan import PlannedRun
from grpo_ray.watch.detectors import detections

Status = Literal["finished", "diverged", "failed", "not finished"]
NOT_FINITE = "recovery.max_skipped_updates"  # beginning of the run's error
STEP_S, SKIPPED = "timing/step_s", "optim/skipped_in_a_row"
COLLAPSED = 0.5  # fraction of the first validation reward


@dataclass(frozen=True)
class ExperimentOutcome:
    """A run's status, its metrics as a row per step, and its validations as (step, reward)."""

    variant: str
    seed: int
    num_steps: int
    status: Status
    reason: str  # of a divergence or failure; otherwise empty
    evaluations: Sequence[tuple[int, float]]
    table: pa.Table
    detected: Mapping[str, int] = field(default_factory=dict)  # the first step at which each detector warns

    @property
    def is_over(self) -> bool:
        """True if the run need not be repeated: divergence is a valid result."""
        return self.status in ("finished", "diverged")

    @property
    def final(self) -> float | None:
        return self.evaluations[-1][1] if self.evaluations else None

    @property
    def best(self) -> float | None:
        return max((reward for _, reward in self.evaluations), default=None)

    def reward_at(self, step: float) -> float | None:
        """Return the validation reward at a step, interpolated linearly; None after the last validation."""
        for (left, low), (right, high) in zip(self.evaluations, self.evaluations[1:], strict=False):
            if left <= step <= right:
                return low + (high - low) * (step - left) / (right - left)
        return None

    def steps_to(self, reward: float) -> int | None:
        """Return the first evaluated step with at least that reward."""
        return next((step for step, value in self.evaluations if value >= reward), None)

    @property
    def seconds(self) -> float | None:
        """Total seconds of all steps, without the startup of the run."""
        return sum(self._step_seconds.values()) if self._step_seconds else None

    def seconds_of(self, metric: str) -> float | None:
        """Return the mean without the first step, which includes compilation and cold caches."""
        values = [value for _, value in self.series(metric)]
        return fmean(values[1:] or values) if values else None

    def seconds_at(self, step: int) -> float:
        return sum(seconds for at, seconds in self._step_seconds.items() if at <= step)

    def series(self, metric: str) -> list[tuple[int, float]]:
        """Return the metric as (step, value), without missing and non-finite values (null in the files)."""
        is_there = metric in self.table.column_names
        rows = self.table.select(list({"step", metric})).to_pylist() if is_there else []
        return [(row["step"], float(row[metric])) for row in rows if row[metric] is not None]

    def last_quarter(self, metric: str) -> float | None:
        """Return the mean over the last quarter of the completed steps."""
        last = max((step for step, _ in self.series("step")), default=0)
        values = [value for step, value in self.series(metric) if step > last - math.ceil(last / 4)]
        return fmean(values) if values else None

    @cached_property
    def _step_seconds(self) -> dict[int, float]:
        return dict(self.series(STEP_S))


def read_outcome(run: PlannedRun, error: str | None = None) -> ExperimentOutcome:
    """Return the outcome that a run's files show; `error` is that of its process, if it failed.

    Raises:
        RunError: another process is writing the files.
    """
    directory, num_steps = run.directory, run.config.algorithm.num_steps
    with directory.lock() if directory.path.exists() else nullcontext():
        table = log_table(lines := StepLines(directory.metrics_path))
        evaluations = [
            (row["step"], float(row["reward"]))
            for row in StepLines(directory.evaluations_summary_path)
            if row["reward"] is not None
        ]
        status, reason = _status(run, table, evaluations, error)
        found = detections(run.config, lines)
    detected = {str(each.name): each.step for each in reversed(found)}
    return ExperimentOutcome(run.variant, run.seed, num_steps, status, reason, evaluations, table, detected)


def _status(
    run: PlannedRun, table: pa.Table, evaluations: Sequence[tuple[int, float]], error: str | None
) -> tuple[Status, str]:
    newest = CheckpointStore(run.directory, run.config.checkpoint).latest()
    last: Mapping[str, Any] = next(iter(table.slice(max(0, len(table) - 1)).to_pylist()), {})
    saved = newest.state.metrics if newest is not None else {}  # alone has a step that ended the run
    num_steps = run.config.algorithm.num_steps
    num_skipped = int(max(row.get(SKIPPED) or 0 for row in (last, saved)))
    if num_skipped >= run.config.recovery.max_skipped_updates or (error or "").startswith(NOT_FINITE):
        return "diverged", f"{num_skipped} steps in a row had no finite update" if num_skipped else str(error)
    is_saved = newest is not None and newest.state.step >= num_steps
    if not (is_saved and last.get("step", 0) >= num_steps):
        return ("not finished", "") if error is None else ("failed", error)
    if evaluations and evaluations[0][1] > 0 and evaluations[-1][1] < COLLAPSED * evaluations[0][1]:
        return "diverged", f"validation reward fell from {evaluations[0][1]:.3f} to {evaluations[-1][1]:.3f}"
    return "finished", ""
