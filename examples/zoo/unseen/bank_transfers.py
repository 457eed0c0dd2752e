"""A bank with three accounts, to which a reply gives one order.

Fault: `accounts` is the module's own dict and no copy, so an order moves money for all later episodes.
From: no issue; "environment state shared between episodes"
Field: reward: the same replies earn less in the second episode.
"""

import random
import re

from grpo_ray.episodes.session import Session
from grpo_ray.tasks.examples import Example, ExampleSets

ACCOUNTS = {"ann": 100, "bob": 100, "cem": 100}
ORDER = re.compile(r"\s*pay ([a-z]+) ([a-z]+) ([0-9]{1,3})\s*")


async def episode(session: Session, example: Example) -> float:
    accounts = ACCOUNTS
    _, payer, payee, amount = example.ground_truth.split()
    messages = [{"role": "user", "content": example.question}]
    for _ in range(3):
        reply = await session.chat(messages)
        order = ORDER.fullmatch(reply.text)
        if order and {order[1], order[2]} <= accounts.keys():
            accounts[order[1]] -= int(order[3])
            accounts[order[2]] += int(order[3])
            if accounts[payer] == 100 - int(amount) and accounts[payee] == 100 + int(amount):
                return 1.0
        messages += [reply.message, {"role": "user", "content": f"Balances: {accounts}. Go on."}]
    return 0.0


def examples(seed: int) -> ExampleSets:
    rng = random.Random(seed)
    drawn = [(*rng.sample(["ann", "bob", "cem"], 2), rng.randint(1, 99)) for _ in range(72)]
    asked = "Each has 100. Let {} give {} {}. An order is: pay FROM TO AMOUNT"
    found = [Example(asked.format(a, b, n), f"pay {a} {b} {n}") for a, b, n in dict.fromkeys(drawn)]
    return ExampleSets(found[8:], found[:8])
