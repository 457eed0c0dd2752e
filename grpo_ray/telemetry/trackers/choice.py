"""The trackers there are, and whether they can be used here."""

import os
from importlib.util import find_spec

from grpo_ray.config import Config
from grpo_ray.config.tracking import TrackerName
from grpo_ray.telemetry.trackers.tracker import Tracker

LIBRARIES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny"}
DATABASES = ("sqlite", "postgresql", "mysql", "mssql")


def make_tracker(name: TrackerName) -> Tracker:
    """Its library is imported when it starts, in its own thread."""
    if name == "tensorboard":
        from grpo_ray.telemetry.trackers.tensorboard_tracker import TensorBoardTracker

        return TensorBoardTracker()
    if name == "wandb":
        from grpo_ray.telemetry.trackers.wandb_tracker import WandbTracker

        return WandbTracker()
    from grpo_ray.telemetry.trackers.mlflow_tracker import MlflowTracker

    return MlflowTracker()


def check_trackers(config: Config) -> None:
    """Refuse what could not begin: a library or a key that is not there, a name that is no project's.

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
        if name == "mlflow":
            _check_store(config.tracking.mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI", ""))


def _is_installed(name: str) -> bool:
    spec = find_spec(name)
    return spec is not None and spec.origin is not None  # a folder of that name, as W&B makes, has none


def _check_wandb(project: str) -> None:
    """W&B itself would ask for a key amid the run."""
    import wandb

    try:
        wandb.Settings(project=project)
        settings = wandb.setup(wandb.Settings(silent=True)).settings
        is_online = settings.mode not in ("offline", "dryrun", "disabled")
        has_key = not is_online or wandb.login(prompt=False, verify=False)
    except wandb.Error as error:  # of a name or a key that cannot be one
        raise ValueError(f"tracking.trackers: wandb: {error}") from None
    if not has_key:
        raise ValueError(
            "tracking.trackers: wandb has no API key; run wandb login, or set WANDB_API_KEY, "
            "or WANDB_MODE=offline (upload later with wandb sync)"
        )


def _check_store(uri: str) -> None:
    if uri.startswith(DATABASES) and not _is_installed("sqlalchemy"):
        raise ValueError(
            f"tracking.mlflow_uri: {uri.partition(':')[0]} takes MLflow's own server libraries: pip install "
            "mlflow; or give a server's address or a folder"
        )
