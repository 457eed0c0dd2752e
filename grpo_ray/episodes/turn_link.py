"""The way from a worker to one Generator: turns go out together, and come back together (turn_box.py)."""

import asyncio
import itertools
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from grpo_ray.episodes.turn_box import FinishedTurns, Turn, Worker
from grpo_ray.types import Completion, SamplingSettings


class TurnClient(Protocol):
    """The part of a Generator's client that turns need (actors/clients.py)."""

    def begin_turns(
        self, worker: Worker, turns: Mapping[int, Turn], cancelled: Sequence[int]
    ) -> Awaitable[None]: ...
    def finished_turns(self, worker: Worker) -> Awaitable[FinishedTurns]: ...


class TurnLink:
    """One Generator's turns. An error of a call, such as the Generator's death, fails all of them."""

    def __init__(self, client: TurnClient, worker: Worker) -> None:
        """
        Args:
            worker: this process.
        """
        self._client, self._worker = client, worker
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Completion]] = {}  # for the ends of turns
        self._new: dict[int, Turn] = {}
        self._cancelled: list[int] = []
        self._sending: asyncio.Task[None] | None = None
        self._receiving: asyncio.Task[None] | None = None

    @property
    def num_turns(self) -> int:
        """Turns that are running now."""
        return len(self._waiting)

    async def sample(self, token_ids: tuple[int, ...], settings: SamplingSettings) -> Completion:
        """Sample a turn; cancelling the call cancels the turn.

        Raises:
            ActorDied: or another error of the Generator.
        """
        number = next(self._numbers)
        end: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[number] = end
        self._new[number] = token_ids, settings
        self._sending = self._sending or self._start(self._send())
        try:
            return await end
        finally:
            del self._waiting[number]
            if end.cancelled() and self._new.pop(number, None) is None:
                self._cancelled.append(number)
                self._sending = self._sending or self._start(self._send())

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        async def run() -> None:
            try:
                await work
            except Exception as error:
                self._fail_all(error)

        return asyncio.create_task(run())

    def _fail_all(self, error: Exception) -> None:
        self._new, self._cancelled = {}, []
        for end in self._waiting.values():
            if not end.done():
                end.set_exception(error)

    async def _send(self) -> None:
        """Send what there is; what comes meanwhile goes out with the next call."""
        try:
            while self._new or self._cancelled:
                new, self._new, cancelled, self._cancelled = self._new, {}, self._cancelled, []
                sent = self._client.begin_turns(self._worker, new, cancelled)
                self._receiving = self._receiving or self._start(self._receive())
                await sent
        finally:
            self._sending = None

    async def _receive(self) -> None:
        try:
            while self._waiting:
                finished = await self._client.finished_turns(self._worker)
                for number, completion in finished.completions.items():
                    if (end := self._waiting.get(number)) is not None and not end.done():
                        end.set_result(completion)
                for number, error in finished.errors.items():
                    if (end := self._waiting.get(number)) is not None and not end.done():
                        end.set_exception(error)
                await asyncio.sleep(0)  # until the turns have taken their ends
        finally:
            self._receiving = None
