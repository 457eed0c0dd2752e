"""Crossing the frozen lake of Gymnasium, one move per turn."""

import random

import gymnasium

from grpo_ray.episodes.adapters.gymnasium import gymnasium_episode
from grpo_ray.episodes.adapters.rehearsal import rehearse
from grpo_ray.tasks.examples import Example, ExampleSets, Pairs

LAKE = ["SFF", "FHF", "FFG"]  # from the start past a hole to the goal
MOVES = ["left", "down", "right", "up"]  # the environment's actions 0 to 3

episode = gymnasium_episode(
    lambda: gymnasium.make("FrozenLake-v1", desc=LAKE, is_slippery=False, max_episode_steps=12),
    show=lambda cell: f"You stand on {cell}.",
    read_action=lambda text: MOVES.index(text) if text in MOVES else None,
)


def examples(seed: int) -> ExampleSets:
    crossing = Example("Cross the lake.", "")
    return ExampleSets([crossing] * 256, [crossing] * 32)


def warmup(seed: int, num_pairs: int) -> Pairs:
    """Play for a tiny model: prefer the right direction."""
    rng = random.Random(seed)
    moves = [*MOVES, "down", "right"]
    played = examples(seed).train
    return rehearse(episode, played, lambda _: rng.choice(moves), num_pairs)
