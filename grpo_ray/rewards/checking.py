"""The check of a configured reward before anything expensive starts: it exists, and its arguments fit."""

from collections.abc import Mapping
from typing import Any

from grpo_ray.config.reward import Reward
from grpo_ray.config.secrets import check_set
from grpo_ray.config.user_code import check_arguments, import_function, keyword_parameters
from grpo_ray.rewards.builtin import REWARDS


def check_reward(reward: Reward, field: str = "task.reward") -> None:
    """Import the user's own functions, compare the arguments with the signatures, and look for the secrets.

    Raises:
        ValueError: names the field, what is wrong with it, and how to fix it.
    """
    if isinstance(reward, str):
        _check(reward, {}, field)
        return
    for index, term in enumerate(reward):
        if term.secrets and ":" not in term.reward:
            raise ValueError(f"{field}[{index}]: secrets: {term.reward} is built in and reads none; omit them")
        check_set(term.secrets, f"{field}: secrets")  # first: a module may read them as it is imported
        _check(term.reward, term.arguments, f"{field}[{index}]")


def _check(name: str, arguments: Mapping[str, Any], field: str) -> None:
    function = import_function(name, field) if ":" in name else REWARDS[name]
    what = f"{field}: {name}"
    parameters = keyword_parameters(function, "response, ground_truth", what)
    if parameters is not None:
        remedy = f"give `arguments` in a list: [{{reward: {name}, arguments: {{{{}}: ...}}}}]"
        check_arguments(parameters, arguments, what, remedy)
