"""Trackers (TensorBoard, Weights & Biases, MLflow): they receive metrics in addition to the run's files."""

from grpo_ray.watch.trackers.tracker import check_trackers
from grpo_ray.watch.trackers.trackers import NO_TRACKERS, Trackers, tracking

__all__ = ["NO_TRACKERS", "Trackers", "check_trackers", "tracking"]
