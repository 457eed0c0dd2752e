"""A reward function of the user's own, named as `module:function`."""

import importlib
import math
import sys
from collections.abc import Callable
from functools import wraps
from numbers import Real
from pathlib import Path
from typing import Any

from grpo_ray.rewards.base import RewardFn, Scores, scores

FACTS = ("format_reward", "answer_reward")


def import_function(name: str, field: str = "task.reward") -> Callable[..., Any]:
    """Import the function named `module:function`; modules of the current folder are found too.

    Raises:
        ValueError: there is no such module or function, or the module fails.
    """
    module_name, _, function_name = name.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ValueError(
                f"{field}: {module_name!r} imports {error.name!r}, which is not installed; install it"
            ) from error
        raise ValueError(
            f"{field}: there is no module {module_name!r} in {folder} or among the installed packages. "
            "Start in the folder that holds it, or install it"
        ) from None
    except (Exception, SystemExit) as error:  # the module is the user's: show whatever it raises
        raise ValueError(
            f"{field}: importing {module_name!r} failed: {type(error).__name__}: {error}"
        ) from error
    function: Callable[..., Any] | None = getattr(module, function_name, None)
    if function is None:
        raise ValueError(
            f"{field}: {module_name!r} has no function {function_name!r}; its file is {module.__file__}"
        )
    if not callable(function):
        raise ValueError(
            f"{field}: {function_name!r} of {module_name!r} is a {type(function).__name__}, not a function; "
            f"the file is {module.__file__}"
        )
    return function


def as_reward_fn(function: Callable[..., Any], name: str) -> RewardFn:
    """Return the function with a check of its result, which must be a number or a dict of rewards."""

    @wraps(function)
    def reward_fn(response: str, ground_truth: str, **arguments: float | str | bool) -> Scores:
        return _read_result(function(response, ground_truth, **arguments), name)

    return reward_fn


def _read_result(result: Any, name: str) -> Scores:
    """Return the result as scores; a number counts as in the format, and as right if it is at least 1.

    Raises:
        ValueError: the result is neither a finite number nor a dict of finite numbers.
    """
    given = result if isinstance(result, dict) else {"reward": result}
    if "reward" not in given or not given.keys() <= {"reward", *FACTS}:
        raise ValueError(
            f"task.reward: {name} returned a dict of {', '.join(map(repr, given)) or 'nothing'}; it needs "
            "'reward', and may have 'format_reward' and 'answer_reward'"
        )
    for key, value in given.items():
        if not isinstance(value, Real) or not math.isfinite(value):
            raise ValueError(f"task.reward: {name} returned {value!r} as {key!r}; it must be a finite number")
        if key in FACTS and value not in (0, 1):
            raise ValueError(f"task.reward: {name} returned {value!r} as {key!r}; it must be 0 or 1")
    reward = float(given["reward"])
    return scores(reward, given.get("format_reward", 1) == 1, given.get("answer_reward", reward >= 1) == 1)
