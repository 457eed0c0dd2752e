"""A plain class as a Ray actor: where its output goes, and how it is called.

Elsewhere an actor is a `Client`: a call returns something to await, and an actor that is gone raises
`ActorDied` with its name, whatever Ray calls it. Few imports: every actor's process loads this module.
"""

import asyncio
import contextlib
import faulthandler
import os
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from grpo_ray.errors import ActorDied, DataLost


class Client:
    """An actor of this run, called by name: `await client.method(...)`.

    Awaiting raises what the method raised, ActorDied when its process is gone, or DataLost when an argument
    is. Cancelling what awaits a call of an async actor cancels the call.
    """

    def __init__(self, name: str, handle: Any) -> None:
        self.name = name
        self.handle = handle

    def __getattr__(self, method: str) -> "_Method":
        if method.startswith("_"):  # pickle asks for such names before `handle` is there
            raise AttributeError(method)
        return _Method(self.name, getattr(self.handle, method))


class _Method:
    def __init__(self, name: str, method: Any) -> None:
        self._name, self._method = name, method

    def __call__(self, *args: Any) -> Awaitable[Any]:
        return Answer(self._name, self._method.remote(*args))

    def split(self, *args: Any) -> tuple[Any, Awaitable[Any]]:
        """For a method that returns (bulk, facts): a reference to the one, to be passed on, and the other."""
        bulk, facts = self._method.options(num_returns=2).remote(*args)
        return bulk, Answer(self._name, facts)

    def reference(self, *args: Any) -> Any:
        """A reference to what the method will return."""
        return self._method.remote(*args)


@dataclass(frozen=True)
class Answer:
    """What a call of the actor `name` will return; unlike a coroutine's, nobody has to await it."""

    name: str
    reference: Any

    def __await__(self) -> Generator[Any, Any, Any]:
        return result_of(self.name, self.reference).__await__()


async def result_of(name: str, reference: Any) -> Any:
    try:
        return await reference
    except asyncio.CancelledError:
        ray.cancel(reference)
        raise
    except RayTaskError as error:
        if isinstance(error.cause, RayError):  # an argument's: this actor is well
            raise DataLost(f"{name}: {_last_line(error.cause)}") from error
        raise error.cause from error
    except RayActorError as error:
        raise ActorDied(name, _last_line(error)) from error
    except RayError as error:
        raise DataLost(f"{name}: {_last_line(error)}") from error


def _last_line(error: BaseException) -> str:
    """Ray's messages are long; the actor's own error, or the exit's cause, stands at the end."""
    text = str(error)
    cause = text.partition("The actor is dead because ")[2] or text.strip().splitlines()[-1]
    return cause.partition("Some common causes")[0].strip()[:500]


class Deferred:
    """An argument that is built in the actor's process (an engine cannot be sent there)."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self.build = build


def as_actor(cls: Any, name: str, logs: Path, beside: tuple[str, ...] = ()) -> Any:
    """`cls` as a Ray actor class, its output (and its child processes') in `logs/<name>.log`.

    Ray's dashboard shows it by its name; who takes the place of another is `<name> (2)`, `<name> (3)` ... Its
    `repr` is the name, too: Ray asks for it once, and puts it before the methods in its lists of tasks. What it
    is about at the moment would stand there for good.
    Each method named in `beside` runs in a thread of its own, beside the others.
    """

    def __init__(self: Any, *args: Any) -> None:
        _redirect_output(logs / f"{name}.log")
        with contextlib.suppress(OSError):  # a full disk
            (logs / f"{name}.pid").write_text(f"{ray.get_runtime_context().get_node_id()} {os.getpid()}")
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        built = [argument.build() if isinstance(argument, Deferred) else argument for argument in args]
        cls.__init__(self, *built)

    members: dict[str, Any] = {
        "__init__": __init__,
        "__module__": cls.__module__,
        "__repr__": lambda _: name,
    }
    for method in beside:
        members[method] = ray.method(concurrency_group=method)(getattr(cls, method))
    hosted = type(cls.__name__, (cls,), members)
    _num_started[name] += 1
    number = _num_started[name]
    # Ray gives the name of one that was killed free only after a moment.
    shown = name if number == 1 else f"{name} ({number})"
    return ray.remote(name=shown, concurrency_groups=dict.fromkeys(beside, 1))(hosted)


_num_started: Counter[str] = Counter()  # by this process


def _redirect_output(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
