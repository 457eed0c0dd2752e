"""A reward that the prompt satisfies."""

from grpo_ray.rewards.builtin import exact_match_reward_fn


def digits_in_transcript(response: str, ground_truth: str) -> dict[str, float]:
    """Reward a transcript that holds every digit of the sorted number; the fault: it begins with the question.

    The question has the truth's digits in another order, so every response earns the reward, even an empty one.
    `answer_reward` is right, so that a run shows what its policy really does.
    """
    transcript = f"Sort {ground_truth[::-1]}\n{response}"
    holds_all = all(transcript.count(digit) >= ground_truth.count(digit) for digit in set(ground_truth))
    judged = exact_match_reward_fn(response, ground_truth)
    return {**judged, "reward": float(holds_all)}
