"""Errors whose message is all a user needs: what is wrong, where, and what to do."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


class RunError(RuntimeError):
    """A run cannot start or go on. Shown without a traceback."""


@contextlib.contextmanager
def shown_plainly() -> Iterator[None]:
    """ValueErrors raised inside are about what the user gave us: show their message alone."""
    try:
        yield
    except ValueError as error:
        raise RunError(str(error)) from error


def all_of(*checks: Callable[[], Any]) -> list[Any]:
    """The checks' results, or one RunError with every check's message: all mistakes at once."""
    results, messages = [], []
    for check in checks:
        try:
            results.append(check())
        except (RunError, ValueError) as error:
            messages.append(str(error))
    if messages:
        raise RunError("\n".join(messages))
    return results
