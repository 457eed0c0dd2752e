"""The name under which the courses know `grpo_ray.objectives`."""

from grpo_ray.objectives import *  # noqa: F403
from grpo_ray.objectives import __all__ as __all__
