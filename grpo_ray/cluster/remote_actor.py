"""A plain class as a Ray actor: its process, its log, and the client that calls it.

It imports little, because every actor's process loads this module.
"""

import asyncio
import atexit
import contextlib
import faulthandler
import gc
import inspect
import os
import re
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.actor import ActorClass, ActorHandle, ActorMethod
from ray.exceptions import (
    ActorPlacementGroupRemoved,
    ActorUnschedulableError,
    LocalRayletDiedError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    RuntimeEnvSetupError,
    WorkerCrashedError,
)

from grpo_ray.cluster.kinds import NOTHING, Answer, BaseClient, Kind
from grpo_ray.cluster.reaper import process_at
from grpo_ray.config.user_code import IMPORTED, import_from
from grpo_ray.core.clients import WITH_BULK
from grpo_ray.errors import ActorDied, DataLost
from grpo_ray.records.durable import replacing
from grpo_ray.watch.actor_log import redirect_output
from grpo_ray.watch.memory import imports_left_alone

T = TypeVar("T")

# Ray's errors for an actor that has ended or cannot start. Most of them are not RayActorErrors.
DEATHS = (
    RayActorError,
    OutOfMemoryError,  # killed by Ray's memory monitor
    NodeDiedError,
    LocalRayletDiedError,
    WorkerCrashedError,
    ActorUnschedulableError,
    ActorPlacementGroupRemoved,
    RuntimeEnvSetupError,
)


class Client(BaseClient):
    """The client of one actor, with the calls that the Protocols of core/clients.py declare.

    Awaiting an answer raises what the method raised, ActorDied if the actor's process is gone or cannot start,
    or DataLost if the value of an argument is gone. Cancelling a task that awaits a call of an async actor
    cancels the call.
    """

    def __init__(self, name: str, handle: ActorHandle, number: int = 0) -> None:
        """`number`: of the actor's process, among all that the run has started."""
        self.name, self.number, self.handle = name, number, handle

    def _call(self, method: str, args: Sequence[Any]) -> Any:
        remote: ActorMethod = getattr(self.handle, method)
        if method not in WITH_BULK:
            return Answer(partial(result_of, self.name, remote.remote(*args)))
        bulk, facts = remote.options(num_returns=2).remote(*args)
        return bulk, Answer(partial(result_of, self.name, facts))


async def result_of(name: str, reference: Awaitable[T]) -> T:
    """Await a Ray reference, and translate Ray's errors; see `Client`."""
    try:
        return await reference
    except asyncio.CancelledError:
        ray.cancel(reference)
        raise
    except RayTaskError as error:
        if isinstance(error.cause, RayError):  # the argument's: this actor is alive
            raise DataLost(f"{name}: {last_line(error.cause)}") from error
        raise error.cause from error
    except DEATHS as error:
        raise ActorDied(name, last_line(error)) from error
    except RayError as error:
        raise DataLost(f"{name}: {last_line(error)}") from error


def last_line(error: BaseException) -> str:
    """Return the end of Ray's long message, which has the actor's own error or the cause of its exit."""
    # Of pydantic's error, which vLLM raises for a wrong argument, that is the field and what it should be.
    text = re.sub(r"\n  (.* \[type=.*)\n +For further information visit .*", r": \1", str(error) or repr(error))
    text = text.replace("See root cause above", "The cause stands above this in the actor's log")  # vLLM's
    place = 0 if isinstance(error, OutOfMemoryError) else -1  # then advice follows
    cause = text.partition("The actor is dead because ")[2] or text.strip().splitlines()[place]
    return cause.partition("Some common causes")[0].strip()[:500]


def _methods_of(kind: Kind) -> dict[str, Callable[..., Any]]:
    """Return a function for each method, by its name, which calls the one of `self.actor`."""
    functions = inspect.getmembers(kind.calls, inspect.isfunction)
    return {name: _passed_on(name, kind.is_async) for name, _ in functions if not name.startswith("_")}


def _passed_on(method: str, is_async: bool) -> Callable[..., Any]:
    async def call(self: Any, *args: Any) -> Any:
        return await getattr(self.actor, method)(*args)

    return call if is_async else lambda self, *args: getattr(self.actor, method)(*args)


def as_actor(kind: Kind, name: str, logs: Path, beside: Mapping[str, int] = NOTHING) -> ActorClass[Any]:
    """Return a Ray actor class that writes its and its child processes' output to `logs/<name>.log`.

    The log's size is bounded (actor_log.py).

    Ray's dashboard shows it by its name, and its replacements as `<name> (2)`, `<name> (3)` and so on. Its
    `repr` is only the name: Ray reads it once, so it cannot show the current state.

    Args:
        beside: methods that each run in threads of their own, in parallel with the others, and how many.
    """

    def __init__(self: Any, *args: object) -> None:
        gc.disable()  # its passes take a fifth of the time that an engine's imports need
        redirect_output(logs / f"{name}.log")
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)  # before the pid is known elsewhere
        with contextlib.suppress(OSError), replacing(logs / f"{name}.pid", fsync=False) as pid:  # a full disk
            pid.write_text(_address())
        for folder in (*imported, logs.parent / "given"):
            import_from(folder)
        self.actor = kind.make(args)
        gc.enable()
        for_life = contextlib.ExitStack()
        atexit.register(for_life.close)  # or libraries report leaks
        for_life.enter_context(imports_left_alone())

    imported = tuple(IMPORTED)
    members = {"__init__": __init__, "__repr__": lambda _: name, **_methods_of(kind)}
    for method in beside:
        members[method] = ray.method(concurrency_group=method)(members[method])
    hosted = type(kind.name, (), members)
    _num_started[name] += 1
    number = _num_started[name]
    # Ray releases the name of a killed actor only after a moment.
    shown = name if number == 1 else f"{name} ({number})"
    return ray.remote(name=shown, concurrency_groups=dict(beside))(hosted)


_num_started: Counter[str] = Counter()  # by this process


def _address() -> str:
    """Return this process's node, pid and start time."""
    process = process_at(os.getpid())
    assert process is not None
    return f"{ray.get_runtime_context().get_node_id()} {process[0]} {process[1]}"
