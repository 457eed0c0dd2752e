"""Trackers: TensorBoard, Weights & Biases and MLflow, told of a run beside its own files."""

from grpo_ray.telemetry.trackers.choice import check_trackers
from grpo_ray.telemetry.trackers.trackers import NO_TRACKERS, Trackers, tracking

__all__ = ["NO_TRACKERS", "Trackers", "check_trackers", "tracking"]
