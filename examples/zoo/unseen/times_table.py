"""Products, with a calculator in a process of its own: a reply is a product to calculate, or the answer.

Fault: an answer returns before `calculator.terminate()`, so the process outlives its episode.
From: no issue; "leaking processes"
Field: turn: the one with the answer, after which a child process still runs.
"""

import random
import re
import sys
from asyncio.subprocess import PIPE, create_subprocess_exec

from grpo_ray.episodes.session import Session
from grpo_ray.tasks.examples import Example, ExampleSets

PROGRAM = """for line in open(0):
    first, second = line.split("*")
    print(int(first) * int(second), flush=True)"""


async def episode(session: Session, example: Example) -> float:
    calculator = await create_subprocess_exec(sys.executable, "-c", PROGRAM, stdin=PIPE, stdout=PIPE)
    messages = [{"role": "user", "content": example.question}]
    for _ in range(4):
        reply = await session.chat(messages)
        if not re.fullmatch(r"\s*[0-9]{1,9}\s*\*\s*[0-9]{1,9}\s*", reply.text):
            return float(reply.text.strip() == example.ground_truth)
        calculator.stdin.write(f"{reply.text.strip()}\n".encode())  # type: ignore[union-attr]
        product = await calculator.stdout.readline()  # type: ignore[union-attr]
        messages += [reply.message, {"role": "user", "content": product.decode().strip()}]
    calculator.terminate()
    return 0.0


def examples(seed: int) -> ExampleSets:
    rng = random.Random(seed)
    drawn = [rng.sample(range(10, 100), 2) for _ in range(72)]
    found = [Example(f"What is {a} * {b}? You may ask me: 3 * 4", str(a * b)) for a, b in drawn]
    return ExampleSets(found[:64], found[64:])
