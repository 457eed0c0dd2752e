"""MLflow: a run of an experiment, on a server or in a folder."""

import csv
import io
import os
import re
import time
from collections.abc import Container, Mapping, Sequence
from typing import Any

import yaml

from grpo_ray.config.schema import leaves
from grpo_ray.records.run_files import step_name
from grpo_ray.watch.trackers.tracker import End, Row, TrackedRun

# MLflow's own limits on parameters per call, and on a parameter's length.
PARAMS_AT_A_TIME = 100
PARAM_CHARACTERS = 6000
OWN = "episodes/metrics/"
STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


class MlflowTracker:
    """A tracker on MLflow's client, which has no global active run that other code could change."""

    def __init__(self) -> None:
        self._client: Any = None
        self._run_id = ""

    def start(self, run: TrackedRun) -> str:
        default = str(run.folder.resolve().parents[2] / "mlruns")  # wherever the run is resumed from
        uri = run.config.tracking.mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI") or default
        if "://" not in uri or uri.startswith("file:"):  # MLflow 3.17 refuses folders otherwise
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=uri)
        self._run_id = run.id or self._create(run)
        run.keep_id(self._run_id)
        self._client.update_run(self._run_id, status="RUNNING")
        text = yaml.safe_dump(run.config.model_dump(mode="json"), sort_keys=False)
        self._client.log_text(self._run_id, text, "config.yaml")  # parameters stay those of the first start
        return f"{uri}, run {self._run_id}"

    def _create(self, run: TrackedRun) -> str:
        from mlflow.entities import Param

        experiment_id = _experiment(self._client, run.config.tracking.project)
        run_id: str = self._client.create_run(experiment_id, run_name=run.name).info.run_id
        params = [
            Param(path, str(value)[:PARAM_CHARACTERS])
            for path, value in leaves(run.config.model_dump(mode="json")).items()
        ]
        for start in range(0, len(params), PARAMS_AT_A_TIME):
            self._client.log_batch(run_id, params=params[start : start + PARAMS_AT_A_TIME])
        return run_id

    def resume_from(self, step: int) -> None:
        """Do nothing: MLflow keeps what it already has of later steps, which then have two values."""

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        points = [Metric(_flat(name, metrics), value, now_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=points)

    def table(self, name: str, step: int, rows: Sequence[Row]) -> None:
        """Log the table as CSV, which MLflow's pages show as a table."""
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        self._client.log_text(self._run_id, text.getvalue(), f"{name}/{step_name(step)}.csv")

    def close(self, end: End) -> None:
        self._client.set_terminated(self._run_id, STATUS[end])


def _experiment(client: Any, name: str) -> str:
    """Return the id of the experiment of this name, which is created if necessary."""
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            return str(client.create_experiment(name))
        except MlflowException:  # a run that started at the same time may have created it
            experiment = client.get_experiment_by_name(name)
            if experiment is None:
                raise
    return str(experiment.experiment_id)


def _flat(name: str, names: Container[str]) -> str:
    """Return `eval/reward.sorting` for `eval/reward/sorting` if `eval/reward` exists too.

    MLflow's folder store has one file per metric, and a path cannot be both a file and a folder. An episode's
    own metrics, of any names, stay in one folder, with the characters that MLflow allows.
    """
    before, is_own, own = name.partition(OWN)
    if is_own:
        return before + OWN + re.sub(r"[^\w. :-]|^\.+$", "_", own)
    parent, _, last = name.rpartition("/")
    return f"{parent}.{last}" if parent in names else name
