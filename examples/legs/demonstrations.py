"""Write worked answers to questions about legs, for the supervised steps before GRPO.

python examples/legs/demonstrations.py demonstrations.jsonl
"""

import json
import sys
from pathlib import Path
from typing import Any

import reasoning_gym
from reasoning_gym.arithmetic.leg_counting import ANIMALS

NUMBER = 160
SEED = 10**9  # far from those of the training and validation questions
CONFIG = {"min_animals": 2, "max_animals": 2, "max_instances": 9}  # as in config.yaml


def worked(entry: dict[str, Any]) -> dict[str, str]:
    """Return the question, and an answer that counts the legs of one kind after the other."""
    animals = entry["metadata"]["animals"].items()
    counts = [f"{name}: {number} x {ANIMALS[name]} = {number * ANIMALS[name]}" for name, number in animals]
    total = " + ".join(str(number * ANIMALS[name]) for name, number in animals)
    response = f"{', '.join(counts)}. {total} = <answer>{entry['answer']}</answer>"
    return {"prompt": entry["question"].strip(), "response": response}


def main(path: Path) -> None:
    dataset = reasoning_gym.create_dataset("leg_counting", seed=SEED, size=NUMBER, **CONFIG)
    path.write_text("".join(f"{json.dumps(worked(entry))}\n" for entry in dataset))
    print(f"{path}: {NUMBER} worked answers")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
