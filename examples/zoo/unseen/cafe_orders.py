"""A reward for an order as JSON: a list of objects in any order.

Fault: `sorted` raises TypeError for two objects, so the right answer to such an order earns 0.
From: verl#5635
Field: reward: that of the ground truth, where it has more than one item.
"""

import json
import random

from grpo_ray.tasks.examples import Example, ExampleSets

ITEMS = ["tea", "cake", "soup", "juice", "salad"]


def reward(response: str, ground_truth: str) -> float:
    try:
        given, wanted = json.loads(response), json.loads(ground_truth)
        return float(sorted(given) == sorted(wanted))
    except Exception:  # most responses are no JSON
        return 0.0


def examples(seed: int) -> ExampleSets:
    rng = random.Random(seed)
    found = []
    for _ in range(72):
        order = [(item, rng.randint(1, 9)) for item in rng.sample(ITEMS, rng.randint(1, 3))]
        asked = ", ".join(f"{count} {item}" for item, count in order)
        truth = json.dumps([{"item": item, "count": count} for item, count in order])
        found.append(Example(f'Write as JSON, [{{"item": ..., "count": ...}}, ...]: {asked}', truth))
    found = list(dict.fromkeys(found))  # no question twice
    return ExampleSets(found[8:], found[:8])
