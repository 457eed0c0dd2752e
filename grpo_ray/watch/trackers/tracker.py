"""The interface of a tracker and its view of the run; which trackers there are, and whether one can be used."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Protocol

from grpo_ray.config import Config
from grpo_ray.records.durable import write_text

Row = Mapping[str, str | float | None]  # None, as a column of W&B's has one type or null
End = Literal["finished", "interrupted", "failed"]

LIBRARIES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny"}
ID, PLACE = "run_id", "folder"  # files in a tracker's folder
DATABASES = ("sqlite", "postgresql", "mysql", "mssql")


@dataclass(frozen=True)
class TrackedRun:
    """A tracker's view of the run."""

    config: Config
    name: str
    folder: Path  # the tracker's own folder in the run directory

    @property
    def id(self) -> str | None:
        """The id that the tracker gave this run on an earlier start; None: this is the first, or a copy."""
        return None if self.original is not None else _text(self.folder / ID)

    @property
    def original(self) -> Path | None:
        """The folder that this one was copied from, which is there still; None: it is no copy, or was moved.

        A copy would continue the same run in the tracker as its original. One that does not see the original,
        as on another machine, is taken for the run itself.
        """
        place = _text(self.folder / PLACE)
        if place is None or not Path(place).is_dir() or Path(place).samefile(self.folder):
            return None
        is_same = _text(Path(place) / ID) == _text(self.folder / ID)
        return Path(place).parents[1] if is_same else None

    def keep_id(self, run_id: str) -> None:
        """Store the id for later starts of the run, and the folder that it belongs to."""
        for name, text in ((ID, run_id), (PLACE, str(self.folder.resolve()))):
            write_text(self.folder / name, text)


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


def check_trackers(config: Config) -> None:
    """Refuse trackers that could not start: a missing library or key, or an invalid project name.

    Raises:
        ValueError: names the tracker and what to do.
    """
    for name in config.tracking.trackers:
        if not _is_installed(name):
            raise ValueError(
                f"tracking.trackers: {name} is not installed; run pip install {LIBRARIES[name]} "
                f"(grpo_ray's extra {name}), or leave it out"
            )
        if name == "wandb":
            _check_wandb(config.tracking.project)
        store = config.tracking.mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI", "")
        if name == "mlflow" and store.startswith(DATABASES) and not _is_installed("sqlalchemy"):
            raise ValueError(
                f"tracking.mlflow_uri: {store.partition(':')[0]} requires MLflow's server libraries: pip "
                "install mlflow; or give a server's address or a folder"
            )


def _is_installed(name: str) -> bool:
    spec = find_spec(name)
    return spec is not None and spec.origin is not None  # a folder named `wandb`, as W&B creates, has none


def _check_wandb(project: str) -> None:
    """Refuse a missing key now: W&B would ask for it in the middle of the run."""
    import wandb

    try:
        wandb.Settings(project=project)
        settings = wandb.setup(wandb.Settings(silent=True)).settings
        is_online = settings.mode not in ("offline", "dryrun", "disabled")
        has_key = not is_online or wandb.login(prompt=False, verify=False)
    except wandb.Error as error:  # an invalid name or key
        raise ValueError(f"tracking.trackers: wandb: {error}") from None
    if not has_key:
        raise ValueError(
            "tracking.trackers: wandb has no API key; run wandb login, or set WANDB_API_KEY, "
            "or WANDB_MODE=offline (upload later with wandb sync)"
        )
