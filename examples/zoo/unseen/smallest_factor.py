"""Factors of large numbers: the reply is checked by trial division, within a second.

Fault: the check of a large right factor takes longer, and its time-out counts as a wrong answer.
From: no issue; "grader time-out scored 0"
Field: reward: that of the ground truth, where it has eight or nine digits.
"""

import asyncio
import random
from itertools import combinations

from grpo_ray.episodes.session import Session
from grpo_ray.tasks.examples import Example, ExampleSets

PRIMES = [8191, 131071, 99999971, 99999989, 999999929, 999999937]


async def is_smallest_factor(number: int, factor: int) -> bool:
    if factor < 2 or number % factor:
        return False
    for first in range(2, factor, 20_000):  # divisors per turn of the event loop
        if any(number % divisor == 0 for divisor in range(first, min(first + 20_000, factor))):
            return False
        await asyncio.sleep(0)
    return True


async def episode(session: Session, example: Example) -> float:
    reply = await session.chat([{"role": "user", "content": example.question}])
    number, answer = int(example.question.split()[-1]), reply.text.strip()
    try:
        return float(await asyncio.wait_for(is_smallest_factor(number, int(answer)), timeout=1.0))
    except (ValueError, TimeoutError):
        return 0.0


def examples(seed: int) -> ExampleSets:
    drawn = random.Random(seed).sample(list(combinations(PRIMES, 2)), 15)
    found = [Example(f"Name the smallest prime factor of {p * q}", str(p)) for p, q in drawn]
    return ExampleSets(found[:12], found[12:])
