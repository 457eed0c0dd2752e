"""A configured reward, checked before anything expensive starts: that it is there and its arguments fit."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from grpo_ray.config.reward import Reward
from grpo_ray.rewards import REWARDS
from grpo_ray.rewards.user_function import import_function


def check_reward(reward: Reward, field: str = "task.reward") -> None:
    """Import what is the user's, and compare arguments with signatures.

    Raises:
        ValueError: names the field, what is wrong with it, and the fix.
    """
    if isinstance(reward, str):
        _check(reward, {}, field)
        return
    for index, term in enumerate(reward):
        _check(term.reward, term.arguments, f"{field}[{index}]")


def _check(name: str, arguments: Mapping[str, Any], field: str) -> None:
    function = import_function(name, field) if ":" in name else REWARDS[name]
    signature = _signature(function)
    if signature is None:
        return
    further = _further_parameters(signature, name, field)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    for key, value in arguments.items():
        if key in further:
            _check_value(further[key].annotation, value, f"{field}: {name} has {key}={value!r}")
        elif not takes_any:
            names = f"it takes {', '.join(further)}" if further else "it takes none"
            raise ValueError(f"{field}: {name} has no argument {key!r}; {names}")
    missing = [key for key, value in further.items() if value.default is value.empty and key not in arguments]
    if missing:
        raise ValueError(
            f"{field}: {name} needs {', '.join(missing)}; "
            f"give `arguments` in a list: [{{reward: {name}, arguments: {{{missing[0]}: ...}}}}]"
        )


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """None for what C code does not tell."""
    try:
        return inspect.signature(function)
    except ValueError:
        return None


def _further_parameters(signature: inspect.Signature, name: str, field: str) -> dict[str, inspect.Parameter]:
    """Those by name beyond the response and the ground truth, which are passed in place."""
    try:
        taken = signature.bind_partial("", "").arguments
    except TypeError as error:
        raise ValueError(f"{field}: {name} must take (response, ground_truth): {error}") from None
    positional = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    )
    return {
        key: parameter
        for key, parameter in signature.parameters.items()
        if key not in taken and parameter.kind not in positional
    }


def _check_value(annotation: Any, value: Any, what: str) -> None:
    if annotation is inspect.Parameter.empty or isinstance(annotation, str):  # not annotated, or not evaluated
        return
    try:
        TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value)
    except ValidationError as error:
        raise ValueError(f"{what}: {error.errors()[0]['msg'].lower()}") from None
