"""Bad endings of episodes, such as a model's text or a mistake in an environment can bring about.

Each is a function that returns what an episode function returns, or raises what it raises.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch

from grpo_ray.episodes.outcome import Outcome
from grpo_ray.episodes.session import Session
from grpo_ray.tasks.examples import Example, ExampleSets

HALF = "\ud83d"  # of a surrogate pair; a model writes it as "\\ud83d" in JSON


class Unknown:
    """A value that cannot be converted, nor shown."""

    def __float__(self) -> float:
        raise RuntimeError("no number")

    def __repr__(self) -> str:
        raise RuntimeError("no text")


class Unspeakable(Exception):
    """An error that cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Base(BaseException):
    """An error that is no Exception."""


def changed_later() -> Outcome:
    outcome = Outcome(1.0)
    outcome.metrics["late"] = "text"  # type: ignore[index]
    return outcome


def raises(error: BaseException) -> Callable[[], NoReturn]:
    def end() -> NoReturn:
        raise error

    return end


def circle() -> NoReturn:
    first, second = ValueError("first"), ValueError("second")
    first.__context__, second.__context__ = second, first
    raise first


def odd_syntax() -> NoReturn:
    error = SyntaxError("odd")
    error.filename, error.lineno, error.text, error.offset = "file", 1, "text", "place"  # type: ignore[assignment]
    raise error


ENDINGS: dict[str, Callable[[], Any]] = {
    "half a pair in an error": raises(ValueError(f"there is no place {HALF}")),
    "half a pair in a cause": raises(ExceptionGroup(HALF, [ValueError(HALF)])),
    "name of a file that is not UTF-8": raises(FileNotFoundError(2, "no such file", "caf\udce9")),
    "names that are no text": lambda: Outcome(1.0, metrics={7: 1.0, "a": 1.0}),  # type: ignore[dict-item]
    "a metric beyond its bound": lambda: Outcome(1.0, metrics={"m": 10**31}),
    "a metric beyond all floats": lambda: Outcome(1.0, metrics={"m": 10**400}),
    "a metric with too many digits to print": lambda: Outcome(1.0, metrics={"m": 10**5000}),
    "a metric that is not finite": lambda: Outcome(1.0, metrics={"m": np.float32("inf")}),
    "a metric that is text": lambda: Outcome(1.0, metrics={"m": "1"}),  # type: ignore[dict-item]
    "a long name": lambda: Outcome(1.0, metrics={"x" * 100_000: 1.0}),
    "many names": lambda: Outcome(1.0, metrics={f"m{n}": 1.0 for n in range(65)}),
    "metrics that are a list": lambda: Outcome(1.0, metrics=[1.0]),  # type: ignore[arg-type]
    "a metric that is added later": changed_later,
    "a reward beyond its bound": lambda: 1e300,
    "a reward that is not finite": lambda: torch.tensor(float("nan")),
    "a reward that is text": lambda: "0.5",
    "no reward": lambda: None,
    "two rewards": lambda: np.array([0.5, 0.5]),
    "a reward that is complex": lambda: 1j,
    "a reward that cannot be shown": Unknown,
    "a reward of a turn beyond its bound": lambda: Outcome(1.0, (-1e300,)),
    "rewards of too many turns": lambda: Outcome(1.0, (0.5, 0.5, 0.5)),
    "a number in place of rewards of turns": lambda: Outcome(1.0, 0.5),  # type: ignore[arg-type]
    "an error that cannot be shown": raises(Unspeakable()),
    "an error with odd attributes": odd_syntax,
    "errors in a circle": circle,
    "no Exception": raises(Base("bye")),
    "Ctrl-C": raises(KeyboardInterrupt()),
    "the end of a generator": raises(GeneratorExit()),
    "the end of an iteration": raises(StopIteration()),
    "an exit": raises(SystemExit(3)),
    "a cancellation": raises(asyncio.CancelledError()),
}
GOOD: dict[str, tuple[Callable[[], Any], float]] = {
    "NumPy's float": (lambda: np.float32(0.5), 0.5),
    "torch's float": (lambda: torch.tensor(0.5), 0.5),
    "an outcome of torch": (lambda: Outcome(torch.tensor(0.5), metrics={"m": torch.tensor(2)}), 0.5),  # type: ignore[arg-type, dict-item]
    "a truth value": (lambda: True, 1.0),
    "half a pair in a name": (lambda: Outcome(0.5, metrics={f"tool/{HALF}": 1}), 0.5),
    "a whole number": (lambda: Outcome(10**12, metrics={"m": 10**30}), 1e12),
}

played: Counter[str] = Counter()


async def one_bad_ending(session: Session, example: Example) -> Any:
    """Take a turn; the first episode of each training group ends as its example says, the others well."""
    reply = await session.chat([{"role": "user", "content": example.question}])
    played[example.ground_truth] += 1
    if example.ground_truth in ENDINGS and played[example.ground_truth] == 1:
        return ENDINGS[example.ground_truth]()
    return float(sum(reply.text.encode()) % 2)


def examples(seed: int) -> ExampleSets:
    found = [Example(f"Say a number above {n}.", name) for n, name in enumerate(ENDINGS)]
    return ExampleSets(found, [Example(f"Say a number above {n}.", "good") for n in range(90, 92)])


async def odd_names(session: Session, example: Example) -> Outcome:
    """Return the largest rewards, and in each episode 50 names of metrics that no other has."""
    reply = await session.chat([{"role": "user", "content": example.question}])
    sign = 2 * (sum(reply.text.encode()) % 2) - 1
    played["names"] += 50
    names = [f"n{n}" for n in range(played["names"], played["names"] + 50)]
    return Outcome(sign * 1e12, metrics={"asked": 1.0, **dict.fromkeys(names, 1.0)})
