"""The R1-Zero reward: the format, and an answer that is mathematically equal to the ground truth."""

from grpo_ray.rewards.answer_tags import read_answer
from grpo_ray.rewards.math.answer import grade


def r1_zero_reward_fn(response: str, ground_truth: str, fast: bool = True) -> dict[str, float]:
    """Format 1 as `read_answer` says; answer 1 as `grade` says."""
    return grade(read_answer(response), ground_truth, fast)
