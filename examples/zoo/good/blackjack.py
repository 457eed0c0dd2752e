"""Blackjack of Gymnasium: the example's seed deals the same cards to all episodes of a group."""

from grpo_ray.episodes.adapters.gymnasium import gymnasium_episode
from grpo_ray.tasks.examples import Example, ExampleSets

RULES = "Come close to 21, but not above it. Say hit for another card, or stick."
MOVES = ["stick", "hit"]

episode = gymnasium_episode(
    "Blackjack-v1",
    show=lambda hand: f"You have {hand[0]}, and the dealer shows {hand[1]}.",
    read_action=lambda text: MOVES.index(text.strip()) if text.strip() in MOVES else None,
    malformed_reward=-1.0,  # a reply that says neither loses
)


def examples(seed: int) -> ExampleSets:
    return ExampleSets([Example(RULES, "")] * 256, [Example(RULES, "")] * 32)
