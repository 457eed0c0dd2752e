"""The check of a configured reward before anything expensive starts: it exists, and its arguments fit."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from grpo_ray.config.reward import Reward
from grpo_ray.rewards.builtin import REWARDS
from grpo_ray.rewards.user_function import import_function


def check_reward(reward: Reward, field: str = "task.reward") -> None:
    """Import the user's own functions, and compare the arguments with the signatures.

    Raises:
        ValueError: names the field, what is wrong with it, and how to fix it.
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
    parameters = _argument_parameters(signature, name, field)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    for key, value in arguments.items():
        if key in parameters:
            _check_value(parameters[key].annotation, value, f"{field}: {name} has {key}={value!r}")
        elif not takes_any:
            names = f"it takes {', '.join(parameters)}" if parameters else "it takes none"
            raise ValueError(f"{field}: {name} has no argument {key!r}; {names}")
    required = [key for key, parameter in parameters.items() if parameter.default is parameter.empty]
    missing = [key for key in required if key not in arguments]
    if missing:
        raise ValueError(
            f"{field}: {name} needs {', '.join(missing)}; "
            f"give `arguments` in a list: [{{reward: {name}, arguments: {{{missing[0]}: ...}}}}]"
        )


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return the function's signature; None for C code without one."""
    try:
        return inspect.signature(function)
    except ValueError:
        return None


def _argument_parameters(signature: inspect.Signature, name: str, field: str) -> dict[str, inspect.Parameter]:
    """Return the keyword parameters after the response and the ground truth, which are passed by position."""
    try:
        taken = signature.bind_partial("", "").arguments
    except TypeError as error:
        raise ValueError(f"{field}: {name} must take (response, ground_truth): {error}") from None
    not_by_name = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    )
    return {
        key: parameter
        for key, parameter in signature.parameters.items()
        if key not in taken and parameter.kind not in not_by_name
    }


def _check_value(annotation: Any, value: Any, what: str) -> None:
    if annotation is inspect.Parameter.empty or isinstance(annotation, str):  # not annotated, or not evaluated
        return
    try:
        TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value)
    except ValidationError as error:
        raise ValueError(f"{what}: {error.errors()[0]['msg'].lower()}") from None
