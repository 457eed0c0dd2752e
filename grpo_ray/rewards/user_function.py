"""A reward function of the user's own, named as `module:function`."""

import inspect
import math
import os
from collections.abc import Callable
from functools import wraps
from numbers import Real
from typing import Any

from grpo_ray.rewards.base import RewardFn, Scores, scores

FACTS = ("format_reward", "answer_reward")


def as_reward_fn(function: Callable[..., Any], name: str) -> RewardFn:
    """Return the function with a check of its result, which must be a number or a dict of rewards."""

    code = inspect.unwrap(function).__code__ if inspect.isfunction(inspect.unwrap(function)) else None
    where = f"{name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})" if code else name

    @wraps(function)
    def reward_fn(response: str, ground_truth: str, **arguments: float | str | bool) -> Scores:
        return _read_result(function(response, ground_truth, **arguments), where)

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
