"""A configured reward as one function: a built-in by its name, a function of the user's, or a weighted sum."""

from collections.abc import Sequence
from functools import partial

from grpo_ray.config.reward import Reward
from grpo_ray.config.user_code import import_function
from grpo_ray.rewards.base import RewardFn, Scores, scores
from grpo_ray.rewards.builtin import ALGEBRAIC, REWARDS
from grpo_ray.rewards.math.answer import NO_TRUTH
from grpo_ray.rewards.user_function import as_reward_fn


def get_reward_fn(reward: Reward) -> RewardFn:
    """Return the reward as a function of (response, ground truth).

    Raises:
        ValueError: there is no such reward, module or function.
    """
    if isinstance(reward, str):
        return _named(reward)
    return weighted_sum([(term.weight, partial(_named(term.reward), **term.arguments)) for term in reward])


def get_wrong_fn(reward: Reward, own: float | None) -> RewardFn | None:
    """Return a function that gives what a wrong answer earns, for one that could not be judged.

    It takes linear time: the algebra is spared, and a function of the user's is not called.

    Args:
        own: taken as the reward of each function of the user's; with None, a reward with one has no result.
    """
    names = _names(reward)
    if own is None and any(":" in name for name in names):
        return None
    if isinstance(reward, str):
        return _as_wrong(reward, own)
    return weighted_sum(
        [(term.weight, partial(_as_wrong(term.reward, own), **term.arguments)) for term in reward]
    )


def _as_wrong(name: str, own: float | None) -> RewardFn:
    def reward_fn(response: str, ground_truth: str, **arguments: float | str | bool) -> Scores:
        if ":" in name:
            return scores(own or 0.0, has_format=False, is_right=False)
        truth = NO_TRUTH if name in ALGEBRAIC else ground_truth
        return REWARDS[name](response, truth, **arguments)

    return reward_fn


def weighted_sum(terms: Sequence[tuple[float, RewardFn]]) -> RewardFn:
    """Return the sum of weight x reward over (weight, reward) terms; format and answer are the first term's."""

    def reward_fn(response: str, ground_truth: str) -> Scores:
        judged = [function(response, ground_truth) for _, function in terms]
        total = sum(weight * term["reward"] for (weight, _), term in zip(terms, judged, strict=True))
        return {**judged[0], "reward": total}

    return reward_fn


def needs_isolation(reward: Reward) -> bool:
    """Return True for a reward that must be computed in a process that can be killed.

    It may run away, or it is a function of the user's own.
    """
    return uses_algebra(reward) or any(":" in name for name in _names(reward))


def uses_algebra(reward: Reward) -> bool:
    """Return True if a term of the reward compares answers by computer algebra."""
    return any(name in ALGEBRAIC for name in _names(reward))


def _names(reward: Reward) -> list[str]:
    return [reward] if isinstance(reward, str) else [term.reward for term in reward]


def _named(name: str) -> RewardFn:
    if ":" in name:
        return as_reward_fn(import_function(name, "task.reward"), name)
    if name not in REWARDS:
        raise ValueError(f"task.reward: {name!r} is not a reward; give one of {', '.join(REWARDS)}")
    return REWARDS[name]
