"""Advantages, losses and corrections by name: the package's own, and the user's as `module:function`.

The user's code is imported here and nowhere else, when a run is checked or trains. `report` and `evaluate`
compute none of these, and so import none of the code that a run's configuration names; `audit` computes
advantages again, and imports such code only if the command line says so.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar

from grpo_ray.config.user_code import import_function
from grpo_ray.objectives.advantages import ADVANTAGES
from grpo_ray.objectives.correction import CORRECTIONS
from grpo_ray.objectives.inputs import AdvantageFn, CorrectionFn, LossFn
from grpo_ray.objectives.losses import LOSSES

T = TypeVar("T")


@cache
def advantage_function(name: str) -> AdvantageFn:
    """Return the advantage with this name, or import `module:function`."""
    return _named(name, ADVANTAGES, "algorithm.advantage")


@cache
def loss_function(name: str) -> LossFn:
    """Return the loss with this name, or import `module:function`."""
    return _named(name, LOSSES, "algorithm.loss")


@cache
def correction_function(name: str) -> CorrectionFn:
    """Return the correction with this name, or import `module:function`."""
    return _named(name, CORRECTIONS, "algorithm.off_policy_correction")


def _named(name: str, own: Mapping[Any, Callable[..., T]], field: str) -> Callable[..., T]:
    return import_function(name, field) if ":" in name else own[name]
