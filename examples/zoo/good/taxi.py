"""Taxi of Gymnasium: fetch a passenger and drive to the destination, within 40 moves."""

from functools import partial

import gymnasium

from grpo_ray.episodes.adapters.gymnasium import gymnasium_episode
from grpo_ray.tasks.examples import Example, ExampleSets

STANDS = ["red", "green", "yellow", "blue", "taxi"]
MOVES = ["south", "north", "east", "west", "fetch", "drop"]
RULES = f"A taxi drives on 5 x 5 fields. Fetch the passenger, and drop it at its stand. Say {', '.join(MOVES)}."


def show(state: int) -> str:
    rest, stand = divmod(int(state), 4)
    rest, passenger = divmod(rest, 5)
    row, column = divmod(rest, 5)
    place = f"The taxi is in row {row}, column {column}"
    return f"{place}; the passenger is at {STANDS[passenger]}, and wants to go to {STANDS[stand]}."


episode = gymnasium_episode(
    partial(gymnasium.make, "Taxi-v4", max_episode_steps=40),
    show,
    read_action=lambda text: MOVES.index(text.strip()) if text.strip() in MOVES else None,
    malformed_reward=-400,  # ends the ride, at the price of 40 forbidden moves
)


def examples(seed: int) -> ExampleSets:
    return ExampleSets([Example(RULES, "")] * 256, [Example(RULES, "")] * 32)
