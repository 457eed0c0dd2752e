"""Rewards: functions of a response and its ground truth; docs/rewards.md has each formula."""

from functools import partial

from grpo_ray.config.reward import Reward
from grpo_ray.rewards.base import RewardFn
from grpo_ray.rewards.exact_match import exact_match_reward_fn
from grpo_ray.rewards.graded import graded_reward_fn
from grpo_ray.rewards.keywords import keyword_inclusion_reward_fn
from grpo_ray.rewards.question_only import question_only_reward_fn
from grpo_ray.rewards.r1_zero import r1_zero_reward_fn
from grpo_ray.rewards.shaping import brevity_reward_fn, format_reward_fn
from grpo_ray.rewards.sorting import sort_distance_reward_fn, sort_inclusion_ordering_reward_fn
from grpo_ray.rewards.user_function import as_reward_fn, import_function
from grpo_ray.rewards.weighted_sum import weighted_sum

REWARDS: dict[str, RewardFn] = {
    "brevity": brevity_reward_fn,
    "exact_match": exact_match_reward_fn,
    "format": format_reward_fn,
    "graded": graded_reward_fn,
    "keyword_inclusion": keyword_inclusion_reward_fn,
    "question_only": question_only_reward_fn,
    "r1_zero": r1_zero_reward_fn,
    "sort_distance": sort_distance_reward_fn,
    "sort_inclusion_ordering": sort_inclusion_ordering_reward_fn,
}

ALGEBRAIC = ("graded", "question_only", "r1_zero")  # computer algebra; the others are too simple to run away


def get_reward_fn(reward: Reward) -> RewardFn:
    """The reward as a function of (response, ground truth).

    Raises:
        ValueError: there is no such reward, module or function.
    """
    if isinstance(reward, str):
        return _named(reward)
    return weighted_sum([(term.weight, partial(_named(term.reward), **term.arguments)) for term in reward])


def needs_isolation(reward: Reward) -> bool:
    """Whether it may run away, or is the user's: then it is computed in a process that can be killed."""
    return uses_algebra(reward) or any(":" in name for name in _names(reward))


def uses_algebra(reward: Reward) -> bool:
    return any(name in ALGEBRAIC for name in _names(reward))


def _names(reward: Reward) -> list[str]:
    return [reward] if isinstance(reward, str) else [term.reward for term in reward]


def _named(name: str) -> RewardFn:
    if ":" in name:
        return as_reward_fn(import_function(name), name)
    if name not in REWARDS:
        raise ValueError(f"task.reward: {name!r} is not a reward; give one of {', '.join(REWARDS)}")
    return REWARDS[name]
