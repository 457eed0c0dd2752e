"""Errors whose message is all a user needs: what is wrong, where, and what to do."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

INTERRUPTED = 130  # the shell's exit status for Ctrl-C


class RunError(RuntimeError):
    """A run cannot start or go on. Shown without a traceback."""


class ActorDied(RuntimeError):
    """An actor's process is gone, or its node is."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} died: {reason}")
        self.name = name


class DataLost(RuntimeError):
    """What a call was to work on is gone: the node that held it was lost."""


class Stalled(RuntimeError):
    """Nothing moved for `recovery.stall_timeout_s`, and no Generator or Scorer is to blame."""


@contextlib.contextmanager
def shown_plainly() -> Iterator[None]:
    """ValueErrors raised inside are about what the user gave us: show their message alone."""
    try:
        yield
    except ValueError as error:
        raise RunError(str(error)) from error


def first_error(errors: BaseExceptionGroup) -> BaseException:
    """The first error of the group: the others are its consequences."""
    error = errors.exceptions[0]
    return first_error(error) if isinstance(error, BaseExceptionGroup) else error


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
