"""A story in three parts, of which the prompt is always written as one text.

Fault: the replies are encoded again, and other tokens than the sampled ones are what the policy reads.
From: trl#5242
Field: turn 1: the first token of the reply of turn 0 that is encoded differently.
"""

from grpo_ray.episodes.session import Session
from grpo_ray.tasks.examples import Example, ExampleSets


async def episode(session: Session, example: Example) -> float:
    text, num_closed = example.question, 0
    for part in ("It began when", "Then", "In the end"):
        text += f"\n{part}"
        reply = await session.sample(session.encode(text))
        text += reply.text
        num_closed += reply.text.endswith(".")
    return num_closed / 3


def examples(seed: int) -> ExampleSets:
    found = [Example(f"A story about {thing}.", "") for thing in ("a fox", "rain", "a key", "two boats")]
    return ExampleSets(found[1:], found[:1])
