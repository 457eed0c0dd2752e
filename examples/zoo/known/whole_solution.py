"""A reward for word problems, with the rows as they stand in the file.

Fault: the answer is compared with the whole solution and not with the number at its end: all earn 0.
From: no issue; "constant reward"
Field: reward: that of the ground truth's number.
"""

from grpo_ray.tasks.examples import Example, ExampleSets


def reward(response: str, ground_truth: str) -> float:
    answer = response.rpartition("####")[2].strip()
    return float(answer == ground_truth)


def examples(seed: int) -> ExampleSets:
    found = [
        Example(f"{n} boxes hold 6 eggs each. How many?", f"6 * {n} = {6 * n}\n#### {6 * n}")
        for n in range(2, 9)
    ]
    return ExampleSets(found[2:], found[:2])
