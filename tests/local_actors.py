"""The actors of a run in this process."""

from grpo_ray.cluster.local import LocalActors, LocalClient

__all__ = ["LocalActors", "LocalClient"]
