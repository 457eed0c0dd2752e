"""A control: the rewards of a group's answers, handed out in random order, so that they teach nothing.

grpo-ray train smollm2-sums task.reward='[{reward: "examples.rewards.shuffled:last_number", batched: true}]'
"""

import random

from grpo_ray.rewards import get_reward_fn


def last_number(response: list[str], ground_truth: list[str]) -> list[float]:
    """Return the group's rewards for the last number, as many right ones as there are, in random order."""
    reward = get_reward_fn("last_number")
    earned = [reward(*pair)["reward"] for pair in zip(response, ground_truth, strict=True)]
    return random.Random("\n".join(response)).sample(earned, len(earned))
