"""A tool in a process of its own, which every end of the episode stops: it counts letters, as `wc` would.

The question is drawn from the example's seed, so it is the same for all episodes of a group.
"""

import contextlib
import random
import sys
from asyncio.subprocess import PIPE, create_subprocess_exec

from grpo_ray.episodes.session import Session
from grpo_ray.tasks.examples import Example, ExampleSets

PROGRAM = "for line in open(0): print(len(line.strip()), flush=True)"
SYLLABLES = ["ba", "cor", "di", "fen", "gul", "mar", "ni", "opt", "rus", "tam"]


async def episode(session: Session, example: Example) -> float:
    rng = random.Random(example.seed)
    word = "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(4, 9)))
    counter = await create_subprocess_exec(sys.executable, "-c", PROGRAM, stdin=PIPE, stdout=PIPE)
    try:
        assert counter.stdin is not None
        assert counter.stdout is not None
        messages = [{"role": "user", "content": f"{example.question} {word}"}]
        for _ in range(3):
            reply = await session.chat(messages)
            if not reply.text.startswith("count "):
                return float(reply.text.strip() == str(len(word)))
            counter.stdin.write(" ".join(reply.text[6:].split()).encode(errors="replace")[:1000] + b"\n")
            content = (await counter.stdout.readline()).decode().strip()
            messages += [reply.message, {"role": "user", "content": content}]
        return 0.0
    finally:
        with contextlib.suppress(ProcessLookupError):
            counter.kill()
        await counter.wait()


def examples(seed: int) -> ExampleSets:
    question = "How many letters has this word? Answer a number, or say `count` and a word:"
    return ExampleSets([Example(question, "")] * 64, [Example(question, "")] * 8)
