"""Calls of an actor without Ray, and answers that are never awaited."""

import asyncio
import gc
import warnings
from typing import Any

from grpo_ray.cluster.remote_actor import Client


class Reference:
    """A reference as Ray's: it may be awaited or not."""

    def __await__(self) -> Any:
        yield from asyncio.sleep(0).__await__()
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


def test_an_answer_can_be_awaited_gathered_and_given_a_time_limit() -> None:
    async def run() -> None:
        _, copied = Client("learner", Handle(), ["snapshot"]).snapshot()
        assert await copied == 7
        actor = Client("scorer", PlainHandle())
        assert await asyncio.gather(actor.score(1), actor.score(2)) == [7, 7]
        assert await asyncio.wait_for(actor.ready(), 1.0) == 7

    asyncio.run(run())


def test_an_answer_need_not_be_awaited() -> None:
    """A snapshot's publication may be cancelled before it begins."""
    with warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", RuntimeWarning)  # "... was never awaited"
        Client("learner", Handle(), ["snapshot"]).snapshot()
        Client("scorer", PlainHandle()).score(1)
        gc.collect()
    assert [str(each.message) for each in complaints] == []
