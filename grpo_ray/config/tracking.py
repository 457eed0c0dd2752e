"""The configuration of trackers, which receive metrics in addition to the run directory."""

from typing import Literal

from pydantic import PositiveFloat, PositiveInt, field_validator

from grpo_ray.config.secrets import SECRET_VALUE
from grpo_ray.config.section import NonNegativeInt, Section

TrackerName = Literal["tensorboard", "wandb", "mlflow"]


class TrackingConfig(Section):
    """Destinations of metrics and tables in addition to the run directory."""

    trackers: tuple[TrackerName, ...] = ()
    """Trackers to use; each is an extra to install, such as `pip install "grpo_ray[wandb]"`."""
    project: str = "grpo_ray"
    """W&B project or MLflow experiment."""
    rollouts_per_table: PositiveInt = 16
    """Rows per table of rollouts or of validation responses."""
    rollouts_every_num_steps: NonNegativeInt = 10
    """Log a table of rollouts every N steps, read from the run's files; 0 logs none."""
    mlflow_uri: str | None = None
    """MLflow server or folder; default: `MLFLOW_TRACKING_URI`, or the folder `mlruns` in `run.output_dir`."""
    close_timeout_s: PositiveFloat = 20.0
    """Seconds to wait at the end of a run for unsent data."""

    @field_validator("trackers")
    @classmethod
    def _each_once(cls, trackers: tuple[TrackerName, ...]) -> tuple[TrackerName, ...]:
        if len(set(trackers)) < len(trackers):
            raise ValueError(f"{', '.join(trackers)}: name each tracker once")
        return trackers

    @field_validator("project")
    @classmethod
    def _has_a_name(cls, project: str) -> str:
        if not project.strip():
            raise ValueError("give the project a name")
        return project

    @field_validator("mlflow_uri")
    @classmethod
    def _holds_no_password(cls, uri: str | None) -> str | None:
        if uri is not None and SECRET_VALUE.search(uri):
            raise ValueError(
                "the address holds a password, and the configuration is written to the run's folder; "
                "leave it out, and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
        return uri
