"""Errors with a message that is all the user needs: the problem, its place and the remedy."""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

INTERRUPTED = 130  # exit status of a program ended by Ctrl-C, as in a shell
IN_GRADER = "GRPO_RAY_IN_GRADER"  # variable of processes that import a user's reward
FORGED = "does not know this run's secret"  # in the text of an error that a foreign process caused


class RunError(RuntimeError):
    """A run that cannot start or continue. Shown without a traceback."""


class ActorDied(RuntimeError):
    """The end of an actor's process, or of its node."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)  # which a pickle keeps: an actor may report another's death
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"{self.name} died: {self.reason}"


class OutOfDeviceMemory(ActorDied):
    """The end of an actor that ran out of its GPU's memory, together with its other ranks."""

    def __init__(self, name: str, reason: str, num_tokens: int) -> None:
        """`num_tokens`: of the micro-batch that did not fit."""
        super().__init__(name, reason)
        self.args, self.num_tokens = (name, reason, num_tokens), num_tokens


class DataLost(RuntimeError):
    """The loss of a call's arguments, or of its answer, with the process or node that held them."""


class TurnLost(DataLost):
    """The loss of one turn of an episode with two Generators, one after the other."""


class TurnUnanswered(TurnLost):
    """The end of an episode's time in a turn of a Generator that does not answer: it alone is lost."""


class Stalled(RuntimeError):
    """No progress for `recovery.stall_timeout_s`, for which nothing that can be replaced is the cause."""


@contextlib.contextmanager
def shown_plainly() -> Iterator[None]:
    """Convert ValueErrors to RunErrors: they concern the user's input, so their message is enough."""
    try:
        yield
    except ValueError as error:
        raise RunError(str(error)) from error


@contextlib.contextmanager
def ray_needed(otherwise: str = "") -> Iterator[None]:
    """Convert the failed import of Ray, which is an optional package, to a RunError with the remedies."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise RunError(f"this needs Ray: pip install 'grpo_ray[cluster]'{otherwise}") from None


def require_bitsandbytes(field: str, value: str, other: str) -> None:
    """Refuse a field's value without the optional package that implements it; `other` needs none.

    Raises:
        ValueError: bitsandbytes is not installed.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(
            f"{field}: {value} needs the package bitsandbytes on the Learner's machine; install it with "
            f"`pip install bitsandbytes`, or set {field} to {other}"
        )


def first_error(errors: BaseExceptionGroup) -> BaseException:
    """Return the group's first error, of which the others are consequences."""
    error = errors.exceptions[0]
    return first_error(error) if isinstance(error, BaseExceptionGroup) else error


def all_of(*checks: Callable[[], Any]) -> list[Any]:
    """Run all checks and return their results, or raise one RunError with the messages of all that failed."""
    results, messages = [], []
    for check in checks:
        try:
            results.append(check())
        except (RunError, ValueError) as error:
            messages.append(str(error))
    if messages:
        raise RunError("\n".join(messages))
    return results


def counted(number: int, noun: str, plural: str = "s") -> str:
    """Return the number with its noun: `1 question`, `1,200 questions`, or `2 branches` with "es"."""
    return f"{number:,} {noun}{'' if number == 1 else plural}"
