"""Rewards: functions of a response and its ground truth."""

from grpo_ray.rewards.base import RewardFn
from grpo_ray.rewards.exact_match import exact_match_reward_fn
from grpo_ray.rewards.r1_zero import r1_zero_reward_fn

REWARDS: dict[str, RewardFn] = {"exact_match": exact_match_reward_fn, "r1_zero": r1_zero_reward_fn}


def get_reward_fn(name: str) -> RewardFn:
    if name not in REWARDS:
        raise ValueError(f"task.reward: {name!r} is not a reward; give one of {', '.join(REWARDS)}")
    return REWARDS[name]
