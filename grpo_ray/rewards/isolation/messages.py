"""The messages of a worker and its fork server to the pool: lines of JSON, believed only in their exact form.

A worker may have been taken over by an answer, so a message can be anything.
"""

import json
from typing import Any

from grpo_ray.rewards.base import Scores

MAX_BYTES = 2**16  # of a message
LONGEST_ERROR = 2000  # characters
LARGEST_REWARD = 1e12  # a gradient of it, squared for its norm, still fits into float32

FORMS: dict[str, tuple[type, ...]] = {
    "ready": (int,),
    "failed": (str,),
    "refused": (str,),
    "scores": (dict,),
    "ungradable": (str,),
    "error": (str,),
    "ended": (str, bool, int),
}


class Garbage(ValueError):
    """Bytes that are no message."""


def read_message(line: bytes) -> list[Any]:
    """Return the message: its kind, and its values.

    Raises:
        Garbage: it is none.
    """
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, list) or not message or not isinstance(message[0], str):
        raise Garbage(f"no message: {storable(repr(line[:100]))}")
    kind, *values = message
    form = FORMS.get(kind)
    if form is None or tuple(map(type, values)) != form:
        raise Garbage(f"no message: {storable(repr(line[:100]))}")
    if kind == "scores":
        return [kind, _scores(values[0])]
    return [kind, *(storable(value) if isinstance(value, str) else value for value in values)]


def _scores(values: dict[str, Any]) -> Scores:
    numbers = {name: value for name, value in values.items() if type(value) in (int, float)}
    if numbers.keys() != {"reward", "format_reward", "answer_reward"} or len(numbers) != len(values):
        raise Garbage(f"no scores: {storable(repr(values)[:100])}")
    facts = (numbers["format_reward"], numbers["answer_reward"])
    if not is_storable(numbers["reward"]) or not all(fact in (0, 1) for fact in facts):
        raise Garbage(f"no scores: {storable(repr(values)[:100])}")
    return {name: float(value) for name, value in numbers.items()}


def is_storable(reward: float) -> bool:
    """Return True for a number of which a float32 can hold statistics and gradients."""
    return abs(reward) <= LARGEST_REWARD  # not so for NaN


def storable(text: str) -> str:
    """Shorten the text, and replace lone surrogates."""
    return text[:LONGEST_ERROR].encode(errors="replace").decode()
