"""The available trackers, and the check that the configured ones can be used."""

import os
from importlib.util import find_spec

from grpo_ray.config import Config
from grpo_ray.config.run import TrackerName
from grpo_ray.watch.trackers.tracker import Tracker

LIBRARIES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny"}
DATABASES = ("sqlite", "postgresql", "mysql", "mssql")


def make_tracker(name: TrackerName) -> Tracker:
    """Return the tracker; its library is imported when it starts, in its own thread."""
    if name == "tensorboard":
        from grpo_ray.watch.trackers.tensorboard_tracker import TensorBoardTracker

        return TensorBoardTracker()
    if name == "wandb":
        from grpo_ray.watch.trackers.wandb_tracker import WandbTracker

        return WandbTracker()
    from grpo_ray.watch.trackers.mlflow_tracker import MlflowTracker

    return MlflowTracker()


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
        if name == "mlflow":
            _check_store(config.tracking.mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI", ""))


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


def _check_store(uri: str) -> None:
    if uri.startswith(DATABASES) and not _is_installed("sqlalchemy"):
        raise ValueError(
            f"tracking.mlflow_uri: {uri.partition(':')[0]} requires MLflow's server libraries: pip install "
            "mlflow; or give a server's address or a folder"
        )
