"""Advantages, losses and corrections by name: the package's own, and the user's as `module:function`."""

from collections.abc import Mapping
from functools import cache
from typing import Any, cast

from grpo_ray.algorithms.advantages import ADVANTAGES
from grpo_ray.algorithms.correction import CORRECTIONS
from grpo_ray.algorithms.inputs import AdvantageFn, CorrectionFn, LossFn, arguments_of
from grpo_ray.algorithms.losses import LOSSES
from grpo_ray.config.algorithm import AlgorithmConfig
from grpo_ray.config.user_code import import_function

CORRECTION_FIELDS = {
    "cap": "correction_cap",
    "band": "correction_band",
}  # arguments that are fields of their own


@cache
def advantage_function(name: str) -> AdvantageFn:
    """Return the advantage with this name, or import `module:function`."""
    if ":" in name:
        return import_function(name, "algorithm.advantage")
    return cast("Mapping[str, AdvantageFn]", ADVANTAGES)[name]


@cache
def loss_function(name: str) -> LossFn:
    """Return the loss with this name, or import `module:function`."""
    if ":" in name:
        return import_function(name, "algorithm.loss")
    return cast("Mapping[str, LossFn]", LOSSES)[name]


@cache
def correction_function(name: str) -> CorrectionFn:
    """Return the correction with this name, or import `module:function`."""
    if ":" in name:
        return import_function(name, "algorithm.off_policy_correction")
    return cast("Mapping[str, CorrectionFn]", CORRECTIONS)[name]


def corrections_of(config: AlgorithmConfig) -> tuple[tuple[CorrectionFn, dict[str, Any]], ...]:
    """Return the corrections in effect, each with its keyword arguments."""
    fields = {argument: getattr(config, field) for argument, field in CORRECTION_FIELDS.items()}
    given = {**config.correction_options, **fields}
    functions = [correction_function(name) for name in config.corrections]
    return tuple((function, arguments_of(function, given)) for function in functions)
