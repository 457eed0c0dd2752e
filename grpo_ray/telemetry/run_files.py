"""A run's folder, and the metrics file in it."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_ray.config import Config, dump_config


def step_name(step: int) -> str:
    """How everything that belongs to a step is called; names sort as the steps do."""
    return f"step-{step:06d}"


class RunDirectory:
    """The folder of one run; the attributes are where things lie in it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_path = self.path / "config.yaml"
        self.metrics_path = self.path / "metrics.jsonl"
        self.rollouts = self.path / "rollouts"
        self.evaluations = self.path / "evaluations"
        self.evaluations_summary_path = self.evaluations / "summary.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.logs = self.path / "logs"

    def check_free(self) -> None:
        """Refuse a path that `create` would refuse: for before anything expensive."""
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is a file; give another run.name or run.output_dir")
        if self.path.is_dir() and any(self.path.iterdir()):
            raise ValueError(_in_use(self.path))

    def create(self, config: Config) -> None:
        """Make the folders and write the resolved configuration; refuses a folder that is in use."""
        self.check_free()
        try:
            self.rollouts.mkdir(parents=True)
        except FileExistsError:  # another run of this name made it since the look above
            raise ValueError(_in_use(self.path)) from None
        for folder in (self.evaluations, self.checkpoints, self.logs):
            folder.mkdir()
        dump_config(config, self.config_path)

    def rollouts_path(self, step: int) -> Path:
        return self.rollouts / f"{step_name(step)}.parquet"

    def checkpoint_path(self, step: int) -> Path:
        return self.checkpoints / step_name(step)


class MetricsLog:
    """`metrics.jsonl`: a line a step, readable while the run goes on."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        _drop_half_line(self._path)

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        line = json.dumps(
            {"step": step, **{name: _finite(value) for name, value in metrics.items()}}, allow_nan=False
        )
        with self._path.open("a", encoding="utf-8") as file:  # closed, and so flushed, every step
            file.write(line + "\n")


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines as dicts; a last line that is still being written, or was cut off, is left out."""
    rows = []
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                break
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{path}, line {number}: not valid JSON ({error.msg}); remove the line"
                ) from None
    return rows


def _in_use(path: Path) -> str:
    return (
        f"{path} exists already and is not empty, and a run never writes into another run's folder; "
        "give another run.name, or move the folder away"
    )


def _finite(value: float) -> float | int | None:
    """JSON has no nan and no infinity; numpy's and torch's numbers become Python's."""
    if isinstance(value, int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def _drop_half_line(path: Path) -> None:
    """A killed run may leave half a line, onto which a resumed run would write its first."""
    if not path.exists():
        return
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(data.rfind(b"\n") + 1)
