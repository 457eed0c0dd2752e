"""CliffWalking of Gymnasium, with at most 40 moves."""

from functools import partial

import gymnasium

from grpo_ray.episodes.adapters.gymnasium import gymnasium_episode
from grpo_ray.tasks.examples import Example, ExampleSets

MOVES = ["up", "right", "down", "left"]
RULES = "Walk from the lower left corner of 4 x 12 fields to the lower right one. Between them is a cliff."

episode = gymnasium_episode(
    partial(gymnasium.make, "CliffWalking-v1", max_episode_steps=40),
    show=lambda place: f"You stand in row {place // 12}, column {place % 12}. Say {', '.join(MOVES)}.",
    read_action=lambda text: MOVES.index(text.strip()) if text.strip() in MOVES else None,
    malformed_reward=-5000,  # ends the walk, at the price of more than 40 falls
)


def examples(seed: int) -> ExampleSets:
    return ExampleSets([Example(RULES, "")] * 256, [Example(RULES, "")] * 32)
