"""A run's trackers: what is sent to them, and when."""

import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq

from grpo_ray.config import Config
from grpo_ray.config.run import TrackerName, TrackingConfig
from grpo_ray.records.evaluation_summary import EvaluationSummary
from grpo_ray.records.readable_rollouts import readable_cells, readable_rollouts
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.types import ScoredGroup
from grpo_ray.watch.trackers.delivery import Delivery, Message
from grpo_ray.watch.trackers.mlflow_tracker import MlflowTracker
from grpo_ray.watch.trackers.tensorboard_tracker import TensorBoardTracker
from grpo_ray.watch.trackers.tracker import End, TrackedRun, Tracker
from grpo_ray.watch.trackers.wandb_tracker import WandbTracker

COLUMNS = ["group_id", "prompt", "response", "ground_truth", "reward", "advantage", "num_tokens"]
EPISODE_COLUMNS = ["status", "num_turns"]  # not in files without episodes
# Each imports its library when it starts, in its own thread.
TRACKERS: Mapping[TrackerName, Callable[[], Tracker]] = {
    "tensorboard": TensorBoardTracker, "wandb": WandbTracker, "mlflow": MlflowTracker,
}  # fmt: skip


class Trackers:
    """All of a run's trackers. Every call returns at once; without deliveries it does nothing."""

    def __init__(self, config: TrackingConfig, run: RunDirectory, deliveries: Sequence[Delivery]) -> None:
        self._config, self._run, self._deliveries = config, run, deliveries
        self._without_table: list[int] = []  # steps with rollouts that are not on disk yet

    def resume_from(self, step: int) -> None:
        """Announce that the run starts at this step, or is restored to it."""
        self._without_table = [earlier for earlier in self._without_table if earlier <= step]
        self._send(lambda tracker: tracker.resume_from(step))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send a step's metrics, except those of a validation, which `evaluation` sends."""
        plain = {name: float(value) for name, value in metrics.items() if not name.startswith("eval/")}
        self._send(lambda tracker: tracker.metrics(step, plain))
        every = self._config.rollouts_every_num_steps
        if self._deliveries and every and step % every == 0:
            self._without_table.append(step)
        self._send_rollouts()

    def evaluation(self, summary: EvaluationSummary, groups: Sequence[ScoredGroup]) -> None:
        """Send a validation's metrics and a table of some of its responses."""
        if not self._deliveries:
            return
        metrics = {name: float(value) for name, value in summary.metrics.items()}
        self._send(lambda tracker: tracker.metrics(summary.step, metrics))
        rows = list(map(readable_cells, readable_rollouts(groups, self._config.rollouts_per_table)))
        self._send(lambda tracker: tracker.table("validation", summary.step, rows))

    def take_failures(self) -> list[str]:
        """Return the error of each tracker that was turned off since the last call."""
        return [text for d in self._deliveries if (text := d.take_failure()) is not None]

    def problem(self) -> str | None:
        """Return a warning that names the trackers that do not keep up; None: all do."""
        return "; ".join(text for d in self._deliveries if (text := d.problem()) is not None) or None

    def close(self, end: End) -> list[str]:
        """Send what is queued, for at most `close_timeout_s`; return what went wrong."""
        self._send_rollouts()
        deadline = time.monotonic() + self._config.close_timeout_s
        for delivery in self._deliveries:
            delivery.begin_to_close(end)
        return [text for d in self._deliveries if (text := d.close(deadline)) is not None]

    def _send(self, message: Message) -> None:
        for delivery in self._deliveries:
            delivery.send(message)

    def _send_rollouts(self) -> None:
        """Send the tables of steps that have a file by now; files are written in parallel with training."""
        written = [step for step in self._without_table if os.path.exists(self._run.rollouts_path(step))]
        for step in written:
            self._without_table.remove(step)
            self._send(_rollouts_table(self._run.rollouts_path(step), step, self._config.rollouts_per_table))


NO_TRACKERS = Trackers(TrackingConfig(), RunDirectory("."), ())


@contextmanager
def tracking(
    config: Config, run: RunDirectory, announce: Callable[[str], None], warning: Callable[[str], None]
) -> Iterator[Trackers]:
    """Start the configured trackers, and close them however the block ends.

    Args:
        announce: shows where to find the run in a tracker; called in other threads.
        warning: shows what could not be sent.
    """
    path = run.path.resolve()  # so that `grpo-ray resume .` has a name
    folder = RunDirectory(path).trackers
    deliveries = [
        Delivery(name, TRACKERS[name](), TrackedRun(config, path.name, folder / name), announce)
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
            warning(text)


def _rollouts_table(path: Path, step: int, num_rows: int) -> Message:
    """Return a message of rows of a step's file, read in the tracker's thread; all get the same random rows."""

    def send(tracker: Tracker) -> None:
        try:
            table = pq.ParquetFile(path).read([*COLUMNS, *EPISODE_COLUMNS])
        except FileNotFoundError:  # the run has been restored from a checkpoint since
            return
        draw = random.Random(step).sample(range(table.num_rows), min(num_rows, table.num_rows))
        rows = list(map(readable_cells, table.take(sorted(draw)).to_pylist()))
        if rows:
            tracker.table("rollouts", step, rows)

    return send
