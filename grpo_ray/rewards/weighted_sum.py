"""Several rewards as one."""

from collections.abc import Sequence

from grpo_ray.rewards.base import RewardFn


def weighted_sum(terms: Sequence[tuple[float, RewardFn]]) -> RewardFn:
    """reward = sum of weight x reward over (weight, reward) terms; format and answer are the first term's."""

    def reward_fn(response: str, ground_truth: str) -> dict[str, float]:
        judged = [function(response, ground_truth) for _, function in terms]
        total = sum(weight * term["reward"] for (weight, _), term in zip(terms, judged, strict=True))
        return {**judged[0], "reward": total}

    return reward_fn
