"""Trackers (TensorBoard, Weights & Biases, MLflow): they receive metrics in addition to the run's files."""

from grpo_ray.telemetry.trackers.choice import check_trackers
from grpo_ray.telemetry.trackers.trackers import NO_TRACKERS, Trackers, tracking

__all__ = ["NO_TRACKERS", "Trackers", "check_trackers", "tracking"]
