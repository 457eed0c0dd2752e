"""A guess of a number between 0 and 999, with a log of all guesses so far.

Fault: each answer repeats the whole log, which the conversation already holds.
From: verl#3910
Field: turn 3: its message is longer than all before it.
"""

from grpo_ray.episodes.session import Session
from grpo_ray.tasks.examples import Example, ExampleSets


async def episode(session: Session, example: Example) -> float:
    goal, log = int(example.ground_truth), list[str]()
    messages = [{"role": "user", "content": example.question}]
    for number in range(10):
        reply = await session.chat(messages)
        guess = int(reply.text) if reply.text.isascii() and reply.text.isdigit() else -1
        if guess == goal:
            return 1.0 - number / 10
        log.append(f"Guess {number + 1} was {guess}: too {'low' if guess < goal else 'high'}.")
        messages += [reply.message, {"role": "user", "content": "\n".join(log)}]
    return 0.0


def examples(seed: int) -> ExampleSets:
    found = [Example("Guess my number between 0 and 999.", str(37 * n % 1000)) for n in range(1, 20)]
    return ExampleSets(found[4:], found[:4])
