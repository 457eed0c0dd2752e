"""A riddle: the meaning of a word, by a dictionary on a server, of which the word is to be guessed.

Fault: `look_up` blocks the event loop, so the group's other episodes wait for each of its requests.
From: prime-rl#1484
Field: turn 1 and each wrong guess: the loop stands still for 0.3 s before the message is there.
"""

import random
import time

from grpo_ray.episodes.session import Session
from grpo_ray.tasks.examples import Example, ExampleSets

MEANINGS = {
    "spoon": "a tool to eat soup with", "ladder": "a tool to climb with", "candle": "it burns and gives light",
    "anchor": "it holds a ship in its place", "kettle": "water boils in it", "needle": "a tool to sew with",
    "pillow": "a head rests on it", "basket": "a woven thing to carry fruit in",
}  # fmt: skip


def look_up(word: str) -> str:
    time.sleep(0.3)  # as long as the dictionary's server takes
    return MEANINGS.get(word.strip().lower(), "not in the dictionary")


async def episode(session: Session, example: Example) -> float:
    content = f"{example.question}\nMeaning: {look_up(example.ground_truth)}"
    messages = [{"role": "user", "content": content}]
    for _ in range(3):
        reply = await session.chat(messages)
        if reply.text.strip().lower() == example.ground_truth:
            return 1.0
        messages += [reply.message, {"role": "user", "content": f"No. Yours means: {look_up(reply.text)}"}]
    return 0.0


def examples(seed: int) -> ExampleSets:
    words = random.Random(seed).sample(sorted(MEANINGS), len(MEANINGS))
    found = [Example("Guess the word.", word) for word in words]
    return ExampleSets(found[:6], found[6:])
