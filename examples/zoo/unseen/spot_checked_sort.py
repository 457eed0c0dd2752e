"""A reward for sorted numbers, which checks three pairs of neighbours.

Fault: the pairs are drawn anew by each call, so one and the same response earns different rewards.
From: no issue; "non-deterministic reward"
Field: reward: that of the question's own numbers in their order, graded twice.
"""

import random
import re
from itertools import pairwise

from grpo_ray.tasks.examples import Example, ExampleSets


def reward(response: str, ground_truth: str) -> float:
    numbers = [int(text) for text in re.findall(r"[0-9]{1,9}", response)]
    if sorted(numbers) != [int(text) for text in ground_truth.split()]:
        return 0.0
    checked = random.sample(list(pairwise(numbers)), 3)
    return sum(first <= second for first, second in checked) / len(checked)


def examples(seed: int) -> ExampleSets:
    rng = random.Random(seed)
    drawn = [rng.sample(range(10, 100), 8) for _ in range(72)]
    found = [Example(f"Sort {' '.join(map(str, n))}", " ".join(map(str, sorted(n)))) for n in drawn]
    return ExampleSets(found[:64], found[64:])
