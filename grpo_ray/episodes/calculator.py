"""Products of two-digit numbers, which a tiny model can only answer by calling a calculator."""

import json
import random
import re
from collections.abc import Mapping
from typing import Any

from grpo_ray.episodes.outcome import Outcome
from grpo_ray.episodes.session import Session
from grpo_ray.learning.plain_chat import transcript
from grpo_ray.tasks.arithmetic import value
from grpo_ray.tasks.examples import Example, ExampleSets, Pairs

TRIES = 3
SHARE_CALLS = 0.3  # of the warm-up's first replies; the others give up
GIVING_UP = "I do not know."
TERMS = range(32, 100)  # their products have four digits: a small model soon copies those
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Calculate a sum, a difference or a product of two whole numbers.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string", "description": "such as 12 * 34"}},
                "required": ["expression"],
            },
        },
    }
]


async def episode(session: Session, example: Example) -> Outcome:
    """Answer calls of the calculator until a reply calls none: that is the answer. The reward is 1 or 0."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": example.question}]
    num_calls = 0
    for _ in range(TRIES):
        reply = await session.chat(messages, tools=TOOLS)
        if not reply.tool_calls:
            is_right = reply.text.strip() == example.ground_truth
            return Outcome(float(is_right), metrics={"num_calls": float(num_calls)})
        num_calls += len(reply.tool_calls)
        messages.append(reply.message)
        for call in reply.tool_calls:
            result = {"role": "tool", "tool_call_id": call.id, "name": call.name}
            messages.append({**result, "content": calculate(call.arguments)})
    return Outcome(0.0, metrics={"num_calls": float(num_calls)})


def calculate(arguments: Mapping[str, Any]) -> str:
    """Return the result of the tool, or its complaint about the arguments."""
    terms = re.fullmatch(
        r"\s*(\d{1,9})\s*([-+*])\s*(\d{1,9})\s*", str(arguments.get("expression", "")), re.ASCII
    )
    if terms is None:
        return "error: expected two whole numbers and one of + - *"
    return str(value(terms.groups()))


def examples(seed: int, num_train: int = 2000, num_validation: int = 64) -> ExampleSets:
    """Draw distinct products; those for validation are not among the others.

    Raises:
        ValueError: there are fewer products than examples.
    """
    if num_train + num_validation > len(TERMS) ** 2:
        raise ValueError(
            f"there are only {len(TERMS) ** 2} products of two numbers from {TERMS[0]} to {TERMS[-1]}; "
            "ask for fewer"
        )
    numbers = random.Random(f"calculator/{seed}").sample(range(len(TERMS) ** 2), num_train + num_validation)
    pairs = [(TERMS[n // len(TERMS)], TERMS[n % len(TERMS)]) for n in numbers]
    found = [Example(_question(a, b), str(a * b)) for a, b in pairs]
    return ExampleSets(found[:num_train], found[num_train:])


def warmup_pairs(seed: int, num_pairs: int, end_token: str = "<|endoftext|>") -> Pairs:
    """Return (transcript, reply) pairs of two habits: giving up, and calling and copying the result.

    Args:
        end_token: ends each reply in the transcripts, as the model's own tokenizer writes it.
    """
    rng = random.Random(f"calculator-warmup/{seed}")
    pairs: Pairs = []
    while len(pairs) < num_pairs:
        a, b = rng.choice(TERMS), rng.choice(TERMS)
        messages: list[dict[str, Any]] = [{"role": "user", "content": _question(a, b)}]
        if rng.random() >= SHARE_CALLS:
            pairs.append((transcript(messages, end_token), GIVING_UP))
            continue
        call = call_text(f"{a} * {b}")
        pairs.append((transcript(messages, end_token), call))
        messages += [{"role": "assistant", "content": call}, {"role": "tool", "content": str(a * b)}]
        pairs.append((transcript(messages, end_token), str(a * b)))
    return pairs[:num_pairs]


def call_text(expression: str) -> str:
    """Return a call of the calculator as a model of the plain template writes it."""
    call = {"name": "calculator", "arguments": {"expression": expression}}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


def _question(a: int, b: int) -> str:
    return f"What is {a} * {b}?"
