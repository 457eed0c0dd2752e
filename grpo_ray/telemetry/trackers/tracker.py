"""What a tracker is, and what it knows of the run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from grpo_ray.config import Config
from grpo_ray.telemetry.durable import replacing

Row = Mapping[str, str | float]
End = Literal["finished", "interrupted", "failed"]


@dataclass(frozen=True)
class TrackedRun:
    """The run, as a tracker sees it."""

    config: Config
    name: str
    folder: Path  # the tracker's own, in the run's folder

    @property
    def id(self) -> str | None:
        """What the tracker called this run before; None: it has not been told of it."""
        path = self._id_path
        return path.read_text(encoding="utf-8") if path.exists() else None

    def keep_id(self, run_id: str) -> None:
        """For the run that goes on with this one."""
        with replacing(self._id_path) as partial:
            partial.write_text(run_id, encoding="utf-8")

    @property
    def _id_path(self) -> Path:
        return self.folder / "run_id"


class Tracker(Protocol):
    """One service. All its methods are called in one thread, which is its own: they may take their time.

    Whatever one of them raises turns the tracker off, and the run goes on without it.
    """

    def start(self, run: TrackedRun) -> str:
        """Begin a run, or go on with the one whose id is kept; returns where a person finds it."""

    def go_on_from(self, step: int) -> None:
        """What comes next is of later steps: at the beginning, and when the run went back to a checkpoint."""

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def table(self, name: str, step: int, rows: Sequence[Row]) -> None:
        """Rows with the same columns, at least one."""

    def close(self, end: End) -> None:
        """Send what is left; nothing comes after it."""
