"""Your questions and your reward, in a script."""

import random

import grpo_ray

rng = random.Random(0)
EXAMPLES = [
    {
        "question": f"{n}, {'odd' if n % 2 else 'even'}: ",
        "answer": str(2 * rng.randrange(50) + n % 2),
        "parity": n % 2,
    }
    for n in range(400)
]
CONFIG = {
    # Built here, and taught for a moment to answer as the rows do.
    # A real one is {"path": "owner/name"}.
    "model": {"tiny": {"num_layers": 2, "warmup": {"num_steps": 60}}},
    "task": {"prompt": "question_only"},
    "sampling": {"max_tokens": 6},
    "algorithm": {"num_steps": 40, "prompts_per_step": 16, "samples_per_prompt": 8},
    "learner": {"learning_rate": 3e-3},
    "evaluation": {"every_num_steps": 10},
}


def reward(response: str, parity: int) -> float:
    """Return 1 for a number that is odd or even as the question asks.

    `parity` is a column of the row.
    """
    number = response.strip()
    return float(number.isdecimal() and int(number[-1]) % 2 == parity)


if __name__ == "__main__":
    run = grpo_ray.train(CONFIG, reward=reward, examples=EXAMPLES, local=True)
    print(run.evaluations().select(["step", "reward"]).to_pylist())
