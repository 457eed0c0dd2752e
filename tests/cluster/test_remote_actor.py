"""Calls of an actor without Ray, and answers that are never awaited."""

import asyncio
import gc
import warnings
from typing import Any

import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ActorUnschedulableError,
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayError,
    RayTaskError,
    RuntimeEnvSetupError,
)

from grpo_ray.cluster.remote_actor import Client, result_of
from grpo_ray.errors import ActorDied, DataLost


class Reference:
    """A reference as Ray's, to 7 or to an error: it may be awaited or not."""

    def __init__(self, error: RayError | None = None) -> None:
        self._error = error

    def __await__(self) -> Any:
        yield from asyncio.sleep(0).__await__()
        if self._error is not None:
            raise self._error
        return 7


class Handle:
    """An actor with methods that all answer 7, in addition to a bulky result."""

    def __getattr__(self, _: str) -> Any:
        return self

    def options(self, num_returns: int) -> "Handle":
        assert num_returns == 2
        return self

    def remote(self, *_: Any) -> Any:
        return Reference(), Reference()


class PlainHandle(Handle):
    def remote(self, *_: Any) -> Any:
        return Reference()


async def test_an_answer_can_be_awaited_gathered_and_given_a_time_limit() -> None:
    _, copied = Client("learner", Handle(), ["snapshot"]).snapshot()
    assert await copied == 7
    actor = Client("scorer", PlainHandle())
    assert await asyncio.gather(actor.score(1), actor.score(2)) == [7, 7]
    assert await asyncio.wait_for(actor.ready(), 120) == 7


@pytest.mark.parametrize(
    "error",
    [
        OutOfMemoryError("Task was killed due to the node running low on memory."),
        NodeDiedError("the node is gone"),
        LocalRayletDiedError("the raylet is gone"),
        ActorUnschedulableError("no node has room for its bundle"),
        RuntimeEnvSetupError("pip failed"),
        ActorDiedError(),
        ActorUnavailableError("the connection is gone", b"0" * 16),
    ],
)
async def test_every_end_of_an_actor_is_its_death(error: RayError) -> None:
    """Only some of Ray's errors for it are a RayActorError; a kill for memory is none."""
    with pytest.raises(ActorDied, match="scorer died: ") as caught:
        await result_of("scorer", Reference(error))
    assert caught.value.name == "scorer"


@pytest.mark.parametrize(
    "error", [OutOfMemoryError("of the Generator that made it"), ObjectLostError("0" * 56, None, "")]
)
async def test_an_argument_that_died_with_its_owner_is_no_death_of_the_actor(error: RayError) -> None:
    with pytest.raises(DataLost, match="scorer: "):
        await result_of("scorer", Reference(RayTaskError("score", "traceback", error)))


@pytest.mark.slow
def test_an_answer_need_not_be_awaited() -> None:
    """A snapshot's publication may be cancelled before it begins."""
    with warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", RuntimeWarning)  # "... was never awaited"
        Client("learner", Handle(), ["snapshot"]).snapshot()
        Client("scorer", PlainHandle()).score(1)
        gc.collect()
    assert [str(each.message) for each in complaints] == []
