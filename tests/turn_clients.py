"""Generators for tests of turns: what an EnvironmentWorker calls, with an answer of the test's own."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import TypeVar

import numpy as np

from grpo_ray.episodes.turn_box import FinishedTurns, Turn, TurnBoxes, Worker
from grpo_ray.errors import ActorDied
from grpo_ray.types import Completion, SamplingSettings

T = TypeVar("T")
Answer = Callable[[tuple[int, ...], SamplingSettings], Awaitable[Completion]]
SETTINGS = SamplingSettings(1, 1.0, 1.0, 0, 8)


def completion(*token_ids: int, text: str = "", version: int = 0) -> Completion:
    ids = np.array(token_ids, np.int32)
    return Completion(text, ids, -0.5 * ids.astype(np.float32), np.full(len(ids), version, np.int32), "stop")


NUMBERS = itertools.count()  # of processes


class FakeGenerator:
    """A Generator's client. Its calls fail once it has died, also those under way."""

    def __init__(self, name: str, answer: Answer) -> None:
        self.name, self.number, self._answer = name, next(NUMBERS), answer
        self._boxes = TurnBoxes(self._sample)
        self._dead = asyncio.Event()
        self.num_running = self.num_started = self.num_cancelled = 0
        self.ping_s = 0.0
        self.calls: list[int] = []  # the number of turns that each call began

    def die(self) -> None:
        self._dead.set()

    async def begin_turns(self, worker: Worker, turns: Mapping[int, Turn], cancelled: Collection[int]) -> None:
        await self._alive(asyncio.sleep(0))
        self.calls.append(len(turns))
        self._boxes.of(worker).begin(turns, cancelled)

    async def ping(self) -> None:
        await self._alive(asyncio.sleep(self.ping_s))

    async def finished_turns(self, worker: Worker) -> FinishedTurns:
        return await self._alive(self._boxes.of(worker).finished())

    async def _sample(self, token_ids: tuple[int, ...], settings: SamplingSettings) -> Completion:
        assert settings.num_samples == 1  # a turn has one reply
        self.num_running += 1
        self.num_started += 1
        try:
            return await self._answer(token_ids, settings)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1

    async def _alive(self, work: Awaitable[T]) -> T:
        return await until_death(work, self._dead, ActorDied(self.name, "the test ended it"))


async def until_death(work: Awaitable[T], dead: asyncio.Event, error: ActorDied) -> T:
    """Await the work of an actor, or raise the error once the actor is dead."""
    working, dying = asyncio.ensure_future(work), asyncio.ensure_future(dead.wait())
    try:
        await asyncio.wait({working, dying}, return_when=asyncio.FIRST_COMPLETED)
        if dead.is_set():
            raise error
        return working.result()
    finally:
        working.cancel()
        dying.cancel()


async def at_once(token_ids: tuple[int, ...], settings: SamplingSettings) -> Completion:
    return completion(*token_ids)


async def never(token_ids: tuple[int, ...], settings: SamplingSettings) -> Completion:
    await asyncio.sleep(60)
    raise AssertionError("never")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.001)
