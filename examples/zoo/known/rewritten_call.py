"""A lookup of prices by a tool, and a question about their sum.

Fault: the call is appended as text of its own, not as the policy wrote it.
From: verl#3960
Field: turn 1: the message of the call.
"""

import json

from grpo_ray.episodes.session import Session
from grpo_ray.tasks.examples import Example, ExampleSets

PRICES = {"tea": 3, "cake": 5, "soup": 7}
ITEM = {"type": "object", "properties": {"item": {"type": "string", "enum": [*PRICES]}}}
TOOLS = [
    {"type": "function", "function": {"name": "price", "description": "A price in euros.", "parameters": ITEM}}
]


async def episode(session: Session, example: Example) -> float:
    messages = [{"role": "user", "content": example.question}]
    for _ in range(3):
        reply = await session.chat(messages, tools=TOOLS)
        if not reply.tool_calls:
            return float(reply.text.strip() == example.ground_truth)
        call = reply.tool_calls[0]
        said = f"Action: {call.name} {json.dumps(dict(call.arguments))}"
        answer = str(PRICES.get(str(call.arguments.get("item")), "unknown"))
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": answer}]
    return 0.0


def examples(seed: int) -> ExampleSets:
    found = [
        Example(f"What do tea and {item} cost?", str(3 + PRICES[item])) for item in ("cake", "soup", "tea")
    ]
    return ExampleSets(found[1:], found[:1])
