"""The interface of a tracker, and its view of the run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from grpo_ray.config import Config
from grpo_ray.records.durable import replacing

Row = Mapping[str, str | float]
End = Literal["finished", "interrupted", "failed"]


@dataclass(frozen=True)
class TrackedRun:
    """A tracker's view of the run."""

    config: Config
    name: str
    folder: Path  # the tracker's own folder in the run directory

    @property
    def id(self) -> str | None:
        """The id that the tracker gave this run on an earlier start; None: this is the first, or a copy."""
        return None if self.original is not None else _text(self._id_path)

    @property
    def original(self) -> Path | None:
        """The folder that this one was copied from, which is there still; None: it is no copy, or was moved.

        A copy would continue the same run in the tracker as its original. One that does not see the original,
        as on another machine, is taken for the run itself.
        """
        place = _text(self._place_path)
        if place is None or not Path(place).is_dir() or Path(place).samefile(self.folder):
            return None
        is_same = _text(Path(place) / self._id_path.name) == _text(self._id_path)
        return Path(place).parents[1] if is_same else None

    def keep_id(self, run_id: str) -> None:
        """Store the id for later starts of the run, and the folder that it belongs to."""
        for path, text in ((self._id_path, run_id), (self._place_path, str(self.folder.resolve()))):
            with replacing(path) as partial:
                partial.write_text(text, encoding="utf-8")

    @property
    def _id_path(self) -> Path:
        return self.folder / "run_id"

    @property
    def _place_path(self) -> Path:
        return self.folder / "folder"


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


class Tracker(Protocol):
    """One tracking service. All methods are called in one thread, the tracker's own, and may be slow.

    An exception from any of them turns the tracker off, and the run continues without it.
    """

    def start(self, run: TrackedRun) -> str:
        """Start a run, or resume the one with the stored id; return where the user finds it."""

    def resume_from(self, step: int) -> None:
        """Expect later steps next: called at the start, and when the run is restored from a checkpoint."""

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def table(self, name: str, step: int, rows: Sequence[Row]) -> None:
        """Send a table; there is at least one row, and all have the same columns."""

    def close(self, end: End) -> None:
        """Send what is left; no other call follows."""
