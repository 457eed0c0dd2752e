"""Weights & Biases: a run of a project, online or (WANDB_MODE=offline) in files to upload later."""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_ray.watch.trackers.tracker import End, Row, TrackedRun


class WandbTracker:
    """A tracker that plots points by their step, so that a restored run continues its curves."""

    def __init__(self) -> None:
        self._run: Any = None

    def start(self, run: TrackedRun) -> str:
        import wandb

        run_id = run.id or uuid.uuid4().hex
        run.keep_id(run_id)
        settings = wandb.Settings(
            silent=True,
            console="off",  # the terminal is the run's own
            reinit="create_new",  # otherwise it would continue an unfinished run of this process
            finish_timeout=run.config.tracking.close_timeout_s,  # also limits its work at process exit
        )
        self._run = wandb.init(
            project=run.config.tracking.project, name=run.name, id=run_id, resume="allow",
            dir=str(run.folder), config=run.config.model_dump(mode="json"), allow_val_change=True,
            settings=settings,
        )  # fmt: skip
        self._run.define_metric("*", step_metric="step")
        if self._run.offline:
            return f"offline; upload with: wandb sync {run.folder}/wandb/offline-run-*"
        return self._run.url or "disabled (WANDB_MODE)"

    def resume_from(self, step: int) -> None:
        """Do nothing: W&B keeps what it already has of later steps, which are then plotted twice."""

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def table(self, name: str, step: int, rows: Sequence[Row]) -> None:
        import wandb

        table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self._run.log({"step": step, name: table})

    def close(self, end: End) -> None:
        self._run.finish(exit_code=0 if end == "finished" else 1)
