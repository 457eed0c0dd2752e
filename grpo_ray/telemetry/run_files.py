"""A run's folder: where things lie in it, who may write to it, and going back to a step."""

import re
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import yaml

from grpo_ray.config import Config
from grpo_ray.telemetry.durable import replacing
from grpo_ray.telemetry.json_lines import JsonLines, lines_and_rows
from grpo_ray.telemetry.json_lines import read_lines as read_metrics
from grpo_ray.telemetry.run_lock import locked

__all__ = [
    "JsonLines",
    "MetricsLog",
    "RunDirectory",
    "dump_config",
    "last_logged_step",
    "last_of_each_step",
    "read_metrics",
    "step_name",
]

LOCK_NAME = ".lock"


def step_name(step: int) -> str:
    """How everything that belongs to a step is called; names sort as the steps do."""
    return f"step-{step:06d}"


def dump_config(config: Config, path: Path) -> None:
    """Write the resolved configuration as YAML that `load_config` reads back to the same tree."""
    with replacing(path) as partial:
        partial.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))


class RunDirectory:
    """The folder of one run; the attributes are where things lie in it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_path = self.path / "config.yaml"
        self.metrics_path = self.path / "metrics.jsonl"
        self.events_path = self.path / "events.jsonl"
        self.timeline_path = self.path / "timeline.json"
        self.state_path = self.path / "state.json"  # what the run is doing now
        self.rollouts = self.path / "rollouts"
        self.skipped = self.path / "skipped"  # batches whose update was skipped; made with the first
        self.profile = self.path / "profile"  # traces of learner.profile_steps; made with the first
        self.evaluations = self.path / "evaluations"
        self.evaluations_summary_path = self.evaluations / "summary.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.logs = self.path / "logs"
        self.trackers = self.path / "trackers"  # made when there are any

    def check_free(self) -> None:
        """Refuse a path that `create` would refuse: for before anything expensive."""
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is a file; give another run.name or run.output_dir")
        if self.path.is_dir() and not all(map(self._is_empty, self.path.iterdir())):
            raise ValueError(_in_use(self.path))

    def _is_empty(self, entry: Path) -> bool:
        """It holds nothing of a run: one that was killed as it made its folders can be made again."""
        folders = (self.rollouts, self.evaluations, self.checkpoints, self.logs)
        return entry.name == LOCK_NAME or (entry in folders and not any(entry.iterdir()))

    def create(self, config: Config) -> None:
        """Make the folders and write the resolved configuration; refuses a folder that is in use."""
        self.check_free()
        try:
            self.rollouts.mkdir(parents=True, exist_ok=self.rollouts.exists())
        except FileExistsError:  # another run of this name made it since the look above
            raise ValueError(_in_use(self.path)) from None
        for folder in (self.evaluations, self.checkpoints, self.logs):
            folder.mkdir(exist_ok=True)
        dump_config(config, self.config_path)

    def lock(self) -> AbstractContextManager[None]:
        """Within it, no other process locks this folder; it is made if it is not there.

        Raises:
            RunError: another process holds the lock; names it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        return locked(self.path / LOCK_NAME, self.path)

    def rewind(self, step: int) -> None:
        """Forget what was logged of later steps: a run that resumes from `step` does them again.

        Raises:
            ValueError: a line of a log is not valid JSON.
        """
        for log in (self.metrics_path, self.evaluations_summary_path):
            if log.exists():
                _drop_later_rows(log, step)
        for folder in (self.rollouts, self.evaluations, self.skipped):
            for file in _files_after(folder, step):
                file.unlink(missing_ok=True)

    def rollouts_path(self, step: int) -> Path:
        return self.rollouts / f"{step_name(step)}.parquet"

    def checkpoint_path(self, step: int) -> Path:
        return self.checkpoints / step_name(step)


class MetricsLog:
    """`metrics.jsonl`: a line a step."""

    def __init__(self, path: str | Path) -> None:
        self._lines = JsonLines(path)

    def append(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """Write the step's line; returns why it, or an earlier one, is not on the disk yet."""
        return self._lines.append({"step": step, **metrics})

    def flush(self) -> str | None:
        """As `JsonLines.flush`."""
        return self._lines.flush()


def last_of_each_step(path: str | Path) -> list[dict[str, Any]]:
    """A log's rows in the order of their steps: a resumed run does some again, and the last time counts."""
    rows = read_metrics(path) if Path(path).exists() else []
    return [row for _, row in sorted({row["step"]: row for row in rows}.items())]


def last_logged_step(path: str | Path) -> int:
    """The last step with a line in the metrics file; 0 without any."""
    rows = read_metrics(path) if Path(path).exists() else []
    return max((row["step"] for row in rows), default=0)


def _drop_later_rows(path: Path, step: int) -> None:
    kept = b"".join(line for line, row in lines_and_rows(path) if row["step"] <= step)
    if kept != path.read_bytes():
        with replacing(path) as partial:
            partial.write_bytes(kept)


def _files_after(folder: Path, step: int) -> Iterable[Path]:
    """Files of later steps, and of any step those that were never finished."""
    for file in sorted(folder.glob("*")):
        match = re.fullmatch(r"step-(\d+)\.parquet", file.name)
        is_unfinished = re.fullmatch(r"\.step-\d+\.parquet\.partial", file.name)
        if is_unfinished or (match and int(match[1]) > step):
            yield file


def _in_use(path: Path) -> str:
    return (
        f"{path} exists already and is not empty, and a run never writes into another run's folder; "
        f"go on with `grpo-ray resume {path}`, give another run.name, or move the folder away"
    )
