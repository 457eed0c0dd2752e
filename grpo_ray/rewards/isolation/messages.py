"""The messages of a worker and its fork server to the pool: lines of JSON, believed only in their exact form.

A worker may have been taken over by an answer, so a message can be anything.
"""

import json
from collections.abc import Callable
from math import ceil
from typing import Any

from grpo_ray.rewards.base import FACTS, Result, Scores, ScoringError, Ungradable
from grpo_ray.types import TERM

MAX_BYTES = 2**16  # of a message about up to 64 answers
LONGEST_ERROR = 2000  # characters
LARGEST_REWARD = 1e12  # a gradient of it, squared for its norm, still fits into float32

FORMS: dict[str, tuple[type, ...]] = {
    "ready": (int,),
    "failed": (str,),
    "refused": (str,),
    "results": (list,),
    "ended": (str, bool, int),
}


class Garbage(ValueError):
    """Bytes that are no message."""


def read_message(line: bytes) -> list[Any]:
    """Return the message: its kind, and its values; those of `results` are one for each answer.

    Raises:
        Garbage: it is none.
    """
    try:
        message = json.loads(line)
        kind, *values = message
        if not isinstance(message, list) or tuple(map(type, values)) != FORMS[kind]:
            raise TypeError
        if kind == "results":
            return [kind, [*map(_result, values[0])]]
    except Garbage:
        raise
    except (ValueError, TypeError, KeyError, RecursionError):
        raise Garbage(f"no message: {storable(repr(line[:100]))}") from None
    return [kind, *(storable(value) if isinstance(value, str) else value for value in values)]


def _result(said: Any) -> Result:
    """Return the result of one answer; raises one of several errors if it is none."""
    kind, value = said
    form, make = RESULTS[kind]
    if not isinstance(said, list) or type(value) is not form:
        raise TypeError
    return make(value)


def _scores(values: dict[str, Any]) -> Scores:
    are_numbers = all(type(value) in (int, float) and is_storable(value) for value in values.values())
    are_known = all(name in ("reward", *FACTS) or name.startswith(TERM) for name in values)
    is_whole = "reward" in values and all(values.get(fact) in (0, 1) for fact in FACTS)
    if not are_numbers or not are_known or (values and not is_whole):
        raise Garbage(f"no scores: {storable(repr(values)[:100])}")
    return {name: float(value) for name, value in values.items()}


RESULTS: dict[str, tuple[type, Callable[[Any], Result]]] = {
    "scores": (dict, _scores),
    "ungradable": (str, lambda why: Ungradable(storable(why))),
    "error": (str, lambda why: ScoringError(storable(why))),
}
"""By kind of what is said of one answer."""


def max_bytes(size: int) -> int:
    """Return the most bytes of a message about that many answers."""
    return MAX_BYTES * ceil(size / 64)


def is_storable(reward: float) -> bool:
    """Return True for a number of which a float32 can hold statistics and gradients."""
    return abs(reward) <= LARGEST_REWARD  # not so for NaN


def storable(text: str) -> str:
    """Shorten the text, and replace lone surrogates."""
    return text[:LONGEST_ERROR].encode(errors="replace").decode()
