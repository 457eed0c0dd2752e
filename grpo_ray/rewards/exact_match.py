"""The strictest reward: the answer is the ground truth, character for character."""

from grpo_ray.rewards.answer_tags import read_answer
from grpo_ray.rewards.base import verdict


def exact_match_reward_fn(response: str, ground_truth: str) -> dict[str, float]:
    answer = read_answer(response)
    return verdict(answer is not None, answer == ground_truth.strip())
