"""The messages of a worker and its fork server to the pool: lines of JSON, believed only in their exact form.

A worker may have been taken over by an answer, so a message can be anything.
"""

import json
from collections.abc import Callable
from math import ceil
from typing import Any

from grpo_ray.rewards.base import FACTS, Result, Scores, ScoringError, Ungradable
from grpo_ray.types import TERM

MAX_BYTES = 2**16  # of a message about one answer, or about up to 64 of a group
LONGEST_ERROR = 2000  # characters
LARGEST_REWARD = 1e12  # a gradient of it, squared for its norm, still fits into float32

FORMS: dict[str, tuple[type, ...]] = {
    "ready": (int,),
    "failed": (str,),
    "refused": (str,),
    "scores": (dict,),
    "ungradable": (str,),
    "error": (str,),
    "group": (list,),
    "ended": (str, bool, int),
}
RESULTS: dict[str, Callable[[Any], Result]] = {"scores": dict, "ungradable": Ungradable, "error": ScoringError}
"""By kind of a message about one answer: the type of the result."""


class Garbage(ValueError):
    """Bytes that are no message."""


def read_message(line: bytes) -> list[Any]:
    """Return the message: its kind, and its values.

    Raises:
        Garbage: it is none.
    """
    garbage = Garbage(f"no message: {storable(repr(line[:100]))}")
    try:
        message = json.loads(line)
        kind, *values = message
        is_exact = isinstance(message, list) and tuple(map(type, values)) == FORMS[kind]
    except (ValueError, TypeError, KeyError, RecursionError):
        is_exact = False
    if not is_exact:
        raise garbage
    if kind == "scores":
        return [kind, _scores(values[0])]
    if kind == "group":
        members = [read_message(json.dumps(member).encode()) for member in values[0]]
        if any(member[0] not in RESULTS for member in members):
            raise garbage
        return [kind, members]
    return [kind, *(storable(value) if isinstance(value, str) else value for value in values)]


def _scores(values: dict[str, Any]) -> Scores:
    are_numbers = all(type(value) in (int, float) and is_storable(value) for value in values.values())
    are_known = all(name in ("reward", *FACTS) or name.startswith(TERM) for name in values)
    is_whole = "reward" in values and all(values.get(fact) in (0, 1) for fact in FACTS)
    if not are_numbers or not are_known or (values and not is_whole):
        raise Garbage(f"no scores: {storable(repr(values)[:100])}")
    return {name: float(value) for name, value in values.items()}


def max_bytes(size: int | None) -> int:
    """Return the most bytes of a message: about one answer, or about a group of `size`."""
    return MAX_BYTES * ceil((size or 1) / 64)


def is_storable(reward: float) -> bool:
    """Return True for a number of which a float32 can hold statistics and gradients."""
    return abs(reward) <= LARGEST_REWARD  # not so for NaN


def storable(text: str) -> str:
    """Shorten the text, and replace lone surrogates."""
    return text[:LONGEST_ERROR].encode(errors="replace").decode()
