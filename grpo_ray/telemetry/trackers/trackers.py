"""A run's trackers: what they are told, and when."""

import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pyarrow.parquet as pq

from grpo_ray.config import Config
from grpo_ray.config.tracking import TrackingConfig
from grpo_ray.telemetry.evaluation_summary import EvaluationSummary
from grpo_ray.telemetry.run_files import RunDirectory
from grpo_ray.telemetry.trackers.choice import make_tracker
from grpo_ray.telemetry.trackers.delivery import Delivery, Message
from grpo_ray.telemetry.trackers.tracker import End, Row, TrackedRun, Tracker
from grpo_ray.telemetry.validation_files import sample_rollouts
from grpo_ray.types import ScoredGroup

COLUMNS = ["group_id", "prompt", "response", "ground_truth", "reward", "advantage", "num_tokens"]
MAX_CHARACTERS = 4000  # of a text in a table


class Trackers:
    """Passes on what happens; every call returns at once. Without deliveries, nothing is done."""

    def __init__(self, config: TrackingConfig, run: RunDirectory, deliveries: Sequence[Delivery]) -> None:
        self._config, self._run, self._deliveries = config, run, deliveries
        self._without_table: list[int] = []  # steps whose rollouts are not on the disk yet

    def go_on_from(self, step: int) -> None:
        """The run begins, or goes back to this step."""
        self._without_table = [earlier for earlier in self._without_table if earlier <= step]
        self._send(lambda tracker: tracker.go_on_from(step))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step's line; of a validation `evaluation` tells."""
        plain = {name: float(value) for name, value in metrics.items() if not name.startswith("eval/")}
        self._send(lambda tracker: tracker.metrics(step, plain))
        every = self._config.rollouts_every_num_steps
        if self._deliveries and every and step % every == 0:
            self._without_table.append(step)
        self._send_rollouts()

    def evaluation(self, summary: EvaluationSummary, groups: Sequence[ScoredGroup]) -> None:
        if not self._deliveries:
            return
        metrics = {name: float(value) for name, value in summary.metrics.items()}
        self._send(lambda tracker: tracker.metrics(summary.step, metrics))
        chosen = sample_rollouts(groups, self._config.rollouts_per_table)
        self._send(_table("validation", summary.step, [_cut(asdict(rollout)) for rollout in chosen]))

    def take_failures(self) -> list[str]:
        """Of each tracker that was turned off since, why."""
        return [text for d in self._deliveries if (text := d.take_failure()) is not None]

    def problem(self) -> str | None:
        """Which trackers do not keep up."""
        return "; ".join(text for d in self._deliveries if (text := d.problem()) is not None) or None

    def close(self, end: End) -> list[str]:
        """Send what waits, for `close_timeout_s` at most; returns what went wrong."""
        self._send_rollouts()
        deadline = time.monotonic() + self._config.close_timeout_s
        for delivery in self._deliveries:
            delivery.begin_to_close(end)
        return [text for d in self._deliveries if (text := d.close(deadline)) is not None]

    def _send(self, message: Message) -> None:
        for delivery in self._deliveries:
            delivery.send(message)

    def _send_rollouts(self) -> None:
        """The tables of steps whose file is there by now: it is written beside the training."""
        written = [step for step in self._without_table if os.path.exists(self._run.rollouts_path(step))]
        for step in written:
            self._without_table.remove(step)
            self._send(_RolloutsTable(self._run.rollouts_path(step), step, self._config.rollouts_per_table))


NO_TRACKERS = Trackers(TrackingConfig(), RunDirectory("."), ())


@contextmanager
def tracking(
    config: Config, run: RunDirectory, announce: Callable[[str], None], trouble: Callable[[str], None]
) -> Iterator[Trackers]:
    """The trackers that the configuration names; closed however the block ends.

    Args:
        announce: shows where a tracker has the run; called in other threads.
        trouble: shows what could not be sent.
    """
    path = run.path.resolve()  # `grpo-ray resume .` has a name, too
    folder = RunDirectory(path).trackers
    deliveries = [
        Delivery(name, make_tracker(name), TrackedRun(config, path.name, folder / name), announce)
        for name in config.tracking.trackers
    ]
    trackers = Trackers(config.tracking, run, deliveries)
    end: End = "failed"
    try:
        yield trackers
        end = "finished"
    except KeyboardInterrupt:
        end = "interrupted"
        raise
    finally:
        for text in trackers.close(end):
            trouble(text)


def _table(name: str, step: int, rows: Sequence[Row]) -> Message:
    return lambda tracker: tracker.table(name, step, rows)


class _RolloutsTable:
    """Rows of a step's file, drawn by the step: read in the tracker's thread, the same for all trackers."""

    def __init__(self, path: Path, step: int, num_rows: int) -> None:
        self._path, self._step, self._num_rows = path, step, num_rows

    def __call__(self, tracker: Tracker) -> None:
        try:
            table = pq.ParquetFile(self._path).read(COLUMNS)
        except FileNotFoundError:  # the run went back to a checkpoint meanwhile
            return
        draw = random.Random(self._step).sample(range(table.num_rows), min(self._num_rows, table.num_rows))
        rows = [_cut(row) for row in table.take(sorted(draw)).to_pylist()]
        if rows:
            tracker.table("rollouts", self._step, rows)


def _cut(row: Mapping[str, str | float]) -> Row:
    return {name: _cut_text(value) if isinstance(value, str) else value for name, value in row.items()}


def _cut_text(text: str) -> str:
    more = len(text) - MAX_CHARACTERS
    return text if more <= 0 else f"{text[:MAX_CHARACTERS]}… ({more:,} more characters)"
