"""grpo_ray: GRPO for language models on Ray and vLLM.

    run = grpo_ray.train("configs/quickstart.yaml", local=True)

docs/python.md describes these names; everything else is internal.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_ray.api import Run, evaluate, read_rollouts, train

__version__ = "0.2.0"
__all__ = ["Run", "evaluate", "read_rollouts", "train"]


def __getattr__(name: str) -> Any:
    """Import the interface when it is used: the command line and the actors need none of it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from grpo_ray import api

    return getattr(api, name)
