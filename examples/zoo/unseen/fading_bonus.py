"""A reward for a sum, with a bonus for a bare number that fades while the policy learns the format.

Fault: the bonus fades by the clock and not by the step: the same response earns less later on.
From: no issue; "reward that reads the clock"
Field: reward: that of any bare number, graded now and half an hour later.
"""

import random
import time

from grpo_ray.tasks.examples import Example, ExampleSets

STARTED = time.time()
HALVED_AFTER_S = 600


def reward(response: str, ground_truth: str) -> float:
    answer = response.strip()
    bonus: float = 0.2 * 0.5 ** ((time.time() - STARTED) / HALVED_AFTER_S)
    return float(answer == ground_truth) + bonus * answer.isdecimal()


def examples(seed: int) -> ExampleSets:
    rng = random.Random(seed)
    drawn = [(rng.randint(10, 99), rng.randint(10, 99)) for _ in range(72)]
    found = [Example(f"What is {a} + {b}? Give the number alone.", str(a + b)) for a, b in drawn]
    return ExampleSets(found[:64], found[64:])
