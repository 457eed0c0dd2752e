"""A control: the rewards of a group's answers, handed out in random order, so that they teach nothing.

task.reward=[{reward: "examples.rewards.shuffled:shuffled", batched: true, arguments: {reward: last_number}}]
"""

import random
from typing import Any

from grpo_ray.rewards import get_reward_fn
from grpo_ray.tasks.reasoning_gym import verified


def shuffled(
    response: list[str], ground_truth: list[str], row: list[dict[str, Any]], reward: str = "verified"
) -> list[float]:
    """Return what the group earned, in random order.

    Args:
        reward: a built-in one, or `verified` for the verifier of a task of reasoning-gym.
    """
    if reward == "verified":
        earned = [verified(*each)["reward"] for each in zip(response, ground_truth, row, strict=True)]
    else:
        own = get_reward_fn(reward)
        earned = [own(*each)["reward"] for each in zip(response, ground_truth, strict=True)]
    return random.Random("\n".join(response)).sample(earned, len(earned))
