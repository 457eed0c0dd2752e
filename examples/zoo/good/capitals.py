"""A search that takes a while: it waits in a thread, so the group's other episodes go on."""

import asyncio
import random
import time

from grpo_ray.episodes.outcome import Outcome
from grpo_ray.episodes.session import Session
from grpo_ray.tasks.examples import Example, ExampleSets

CAPITALS = {
    "Norway": "Oslo", "Peru": "Lima", "Kenya": "Nairobi", "Japan": "Tokyo", "Ghana": "Accra",
    "Latvia": "Riga", "Cuba": "Havana", "Nepal": "Kathmandu", "Chile": "Santiago", "Egypt": "Cairo",
}  # fmt: skip


def search(country: str) -> str:
    time.sleep(0.05)  # as long as a server takes
    return CAPITALS.get(country.strip(), "nothing found")


async def episode(session: Session, example: Example) -> Outcome:
    messages = [{"role": "user", "content": example.question}]
    for num_searches in range(3):
        reply = await session.chat(messages)
        if not reply.text.startswith("search "):
            is_right = reply.text.strip() == example.ground_truth
            return Outcome(float(is_right), metrics={"num_searches": float(num_searches)})
        found = await asyncio.to_thread(search, reply.text[7:])
        messages += [reply.message, {"role": "user", "content": found}]
    return Outcome(0.0, metrics={"num_searches": 3.0})


def examples(seed: int) -> ExampleSets:
    drawn = random.Random(seed).sample(sorted(CAPITALS.items()), len(CAPITALS))
    asked = "What is the capital of {}? Answer it, or say `search` and a country."
    found = [Example(asked.format(country), capital) for country, capital in drawn]
    return ExampleSets(found[:8], found[8:])
