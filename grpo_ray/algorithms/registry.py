"""Losses and corrections by name: the package's own, and the user's as `module:function`.

The user's code is imported here and nowhere else, when a run is checked or trains. Commands that read a run,
such as `report` and `evaluate`, compute no loss, and so import none of the code that its configuration names.
"""

from collections.abc import Mapping
from functools import cache
from typing import cast

from grpo_ray.algorithms.correction import CORRECTIONS
from grpo_ray.algorithms.inputs import CorrectionFn, LossFn
from grpo_ray.algorithms.losses import LOSSES
from grpo_ray.config.user_code import import_function

CORRECTION_FIELDS = {
    "cap": "correction_cap",
    "band": "correction_band",
}  # arguments that are fields of their own


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
