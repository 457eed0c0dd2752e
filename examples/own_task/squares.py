"""Squares of numbers: the reward of an answer, and a program that writes the questions."""

import json
import random
from pathlib import Path


def reward_fn(response: str, ground_truth: str) -> dict[str, float]:
    """Return 1 for the right number, and 0.1 for any other."""
    answer = response.strip()
    is_number, is_right = answer.isdecimal(), answer == ground_truth
    reward = 1.0 if is_right else 0.1 if is_number else 0.0
    return {"reward": reward, "format_reward": float(is_number), "answer_reward": float(is_right)}


if __name__ == "__main__":  # 900 questions to train on, 100 others to validate with
    numbers = list(range(1, 1001))
    random.Random(0).shuffle(numbers)
    for name, part in (("train", numbers[100:]), ("validation", numbers[:100])):
        lines = [json.dumps({"question": f"What is {n} squared?", "answer": str(n * n)}) for n in part]
        Path(f"{name}.jsonl").write_text("\n".join(lines) + "\n")
