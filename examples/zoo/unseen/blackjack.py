"""Blackjack of Gymnasium, one reply per card.

Fault: `reset` gets no seed, so the episodes of a group are dealt different cards.
From: NeMo-Gym#775
Field: turn 1: its message differs between the episodes of a group.
"""

import gymnasium

from grpo_ray.episodes.session import Session
from grpo_ray.tasks.examples import Example, ExampleSets

RULES = "Come close to 21, but not above it. Say hit for another card, or stick."


async def episode(session: Session, example: Example) -> float:
    table = gymnasium.make("Blackjack-v1")
    try:
        (own, dealers, _), _ = table.reset()
        messages = [{"role": "user", "content": f"{RULES}\nYou have {own}, and the dealer shows {dealers}."}]
        while True:
            reply = await session.chat(messages)
            action = int("hit" in reply.text.lower())
            (own, dealers, _), reward, is_over, _, _ = table.step(action)
            if is_over:
                return float(reward)
            messages += [reply.message, {"role": "user", "content": f"You have {own}. Hit or stick?"}]
    finally:
        table.close()


def examples(seed: int) -> ExampleSets:
    return ExampleSets([Example(RULES, "")] * 64, [Example(RULES, "")] * 8)
