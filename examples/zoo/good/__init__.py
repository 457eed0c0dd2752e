"""Thirty environments and rewards that are right: a checker must find nothing in them.

`targets` lists them as the command line takes them, from the repository's root.
"""

import json
import random
from pathlib import Path
from typing import Any

import yaml

from examples.own_reward.train import EXAMPLES as PARITIES

OWN = "taxi cliff_walking blackjack vault ball_colors word_count capitals higher_lower hours"
EPISODES = {
    "calculator": "grpo_ray.episodes.calculator:episode",
    "guess_number": "grpo_ray.episodes.guess_number:episode",
    "frozen_lake": "examples.own_environment.frozen_lake:episode",
    **{name: f"examples.zoo.good.{name}:episode" for name in OWN.split()},
}
REASONING_GYM: dict[str, dict[str, Any]] = {
    "base_conversion": {},
    "caesar_cipher": {"min_words": 2, "max_words": 4},
    "calendar_arithmetic": {},
    "chain_sum": {"max_terms": 3},
    "family_relationships": {},
    "gcd": {},
    "leg_counting": {"min_animals": 2, "max_animals": 3},
    "maze": {"max_grid_size": 6},
    "mini_sudoku": {},
    "number_sorting": {"max_numbers": 6},
    "simple_geometry": {},
    "word_sorting": {"max_words": 5},
}
REWARDS: dict[str, Any] = {
    "parity": "examples.own_reward.train:reward",
    "json_object": "examples.rewards.json_object:reward_fn",
    "square_roots": [
        {"reward": "examples.rewards.numeric_tolerance:reward_fn", "arguments": {"tolerance": 0.05}},
        {"reward": "brevity", "weight": 0.1, "arguments": {"free": 20, "span": 80}},
    ],
}


def targets(folder: Path) -> dict[str, str]:
    """Return each one's target by its name: `module:episode`, or a configuration.

    Args:
        folder: gets the configurations that are not in the repository, and the data that they read.
    """
    configs = {
        "sorting": "configs/quickstart.yaml",
        "sums": "configs/smollm2-sums.yaml",
        "trl": "examples/trl_reward/config.yaml",
    }
    tasks = {
        name: {"kind": "reasoning_gym", "name": name, "config": config, "num_train_prompts": 64}
        for name, config in REASONING_GYM.items()
    }
    for name, reward in REWARDS.items():
        rows = _rows(name)
        paths = {"train_path": folder / f"{name}.jsonl", "validation_path": folder / f"{name}-validation.jsonl"}
        for path, part in zip(paths.values(), (rows[8:], rows[:8]), strict=True):
            path.write_text("".join(f"{json.dumps(row)}\n" for row in part))
        texts = {field: str(path) for field, path in paths.items()}
        tasks[name] = {"kind": "file", **texts, "prompt": "question_only", "reward": reward}
    for name, task in tasks.items():
        config = folder / f"{name}.yaml"
        scorer = {"timeout_s": 60}  # the first answer also waits for the import of reasoning-gym
        fields = {"model": {"path": "HuggingFaceTB/SmolLM2-135M-Instruct"}, "task": task, "scorer": scorer}
        config.write_text(yaml.safe_dump(fields))
        configs[name] = str(config)
    return EPISODES | configs


def _rows(name: str) -> list[dict[str, Any]]:
    """Return the questions that a reward is for, with their ground truths."""
    if name == "parity":
        return [{**row, "answer": str(n)} for n, row in enumerate(PARITIES)]  # n is odd where it should be
    numbers = random.Random(0).sample(range(200, 9000), 72)
    if name == "square_roots":
        return [
            {"question": f"About how much is the square root of {n}?", "answer": f"{n**0.5:.3g}"}
            for n in numbers
        ]
    asked = "Write as a JSON object with name and price: a hat of Ada's at {} cents"
    return [{"question": asked.format(n), "answer": json.dumps({"name": "Ada", "price": n})} for n in numbers]
