"""Rewards: functions of a response and its ground truth."""

from grpo_ray.rewards.base import RewardFn
from grpo_ray.rewards.exact_match import exact_match_reward_fn
from grpo_ray.rewards.isolated import IsolatedReward
from grpo_ray.rewards.question_only import question_only_reward_fn
from grpo_ray.rewards.r1_zero import r1_zero_reward_fn

REWARDS: dict[str, RewardFn] = {
    "exact_match": exact_match_reward_fn,
    "question_only": question_only_reward_fn,
    "r1_zero": r1_zero_reward_fn,
}


ISOLATED = ("question_only", "r1_zero")  # computer algebra; the others are too simple to run away


def make_reward_fn(name: str, timeout_s: float, memory_gib: float) -> RewardFn:
    """The reward as a Scorer calls it: bounded in seconds and GiB a response where it could run away."""
    return IsolatedReward(name, timeout_s, memory_gib) if name in ISOLATED else get_reward_fn(name)


def get_reward_fn(name: str) -> RewardFn:
    if name not in REWARDS:
        raise ValueError(f"task.reward: {name!r} is not a reward; give one of {', '.join(REWARDS)}")
    return REWARDS[name]
