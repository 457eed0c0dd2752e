"""The episodes of benchmarks: as many turns as their ground truth says."""

import asyncio

from grpo_ray.episodes.session import Session
from grpo_ray.tasks.examples import Example, ExampleSets

HINT = "A hint: go on."
SLEEP_S = 0.5


async def episode(session: Session, example: Example, turn_s: float = 0.0) -> float:
    """Chat for the number of turns that the ground truth names; the environment costs nothing."""
    messages = [{"role": "user", "content": example.question}]
    for _ in range(int(example.ground_truth)):
        messages += [(await session.chat(messages)).message, {"role": "user", "content": HINT}]
        if turn_s:
            await asyncio.sleep(turn_s)
    return 1.0


async def sleeping(session: Session, example: Example) -> float:
    """Do so with an environment that takes a while."""
    return await episode(session, example, SLEEP_S)


def examples(seed: int) -> ExampleSets:
    """Return one example of each set; the benchmark makes its own."""
    return ExampleSets([Example("Where am I?", "1")], [Example("Where am I?", "1")])
