"""The way from a worker to one Generator: turns go out together, and come back together (turn_box.py)."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol

from grpo_ray.episodes.turn_box import FinishedTurns, Turn, Turns, Worker
from grpo_ray.types import Completion, SamplingSettings


class TurnClient(Protocol):
    """The part of a Generator's client that turns need (core/clients.py)."""

    def begin_turns(self, worker: Worker, turns: Turns, cancelled: Sequence[int]) -> Awaitable[None]: ...
    def finished_turns(self, worker: Worker) -> Awaitable[FinishedTurns]: ...


class SilenceAlarm:
    """A clock of the time since the last sign of life, which stops while none is expected."""

    def __init__(self, limit_s: float, ring: Callable[[], None]) -> None:
        """
        Args:
            ring: called once the clock has come to `limit_s`.
        """
        self._limit_s = self._left_s = limit_s
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None

    def run(self) -> None:
        """Let the clock run, from where it stopped."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._left_s, self._end)

    def stop(self) -> None:
        """Stop the clock."""
        if self._timer is not None:
            self._left_s = max(0.0, self._timer.when() - asyncio.get_running_loop().time())
            self._timer.cancel()
            self._timer = None

    def reset(self) -> None:
        """Stop the clock, and set it back to 0."""
        self.stop()
        self._left_s = self._limit_s

    def _end(self) -> None:
        self.reset()
        self._ring()


class TurnLink:
    """One Generator's turns. An error of a call, such as the Generator's death, fails all of them.

    So does a Generator that has turns and finishes none for long. A single turn has no limit of its own, since
    it also waits for other turns and for weight syncs.
    """

    def __init__(self, client: TurnClient, worker: Worker, silence_s: float) -> None:
        """
        Args:
            worker: this process.
            silence_s: seconds with turns, none of which finishes, before all fail.
        """
        self._client, self._worker, self._silence_s = client, worker, silence_s
        self._alarm = SilenceAlarm(silence_s, self._fail_as_silent)
        self._numbers = itertools.count()
        self.num_answers = 0  # of the Generator, to any call
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
            TimeoutError: it has finished no turn for long.
        """
        number = next(self._numbers)
        end: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[number] = end
        self._new[number] = token_ids, settings
        self._alarm.run()
        self._sending = self._sending or self._start(self._send())
        try:
            return await end
        finally:
            del self._waiting[number]
            if not self._waiting:
                self._alarm.stop()
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

    def _fail_as_silent(self) -> None:
        self._fail_all(TimeoutError(f"it had turns and finished none for {self._silence_s:g} s"))

    async def _send(self) -> None:
        """Send what there is; what comes meanwhile goes out with the next call."""
        try:
            while self._new or self._cancelled:
                new, self._new, cancelled, self._cancelled = self._new, {}, self._cancelled, []
                sent = self._client.begin_turns(self._worker, new, cancelled)
                self._receiving = self._receiving or self._start(self._receive())
                await sent
                self.num_answers += 1
        finally:
            self._sending = None

    async def _receive(self) -> None:
        try:
            while self._waiting:
                finished = await self._client.finished_turns(self._worker)
                self.num_answers += 1
                if finished.completions or finished.errors:
                    self._alarm.reset()
                    if self._waiting:  # else these are turns that were cancelled meanwhile: nothing is expected
                        self._alarm.run()
                for number, completion in finished.completions.items():
                    if (end := self._waiting.get(number)) is not None and not end.done():
                        end.set_result(completion)
                for number, error in finished.errors.items():
                    if (end := self._waiting.get(number)) is not None and not end.done():
                        end.set_exception(error)
                await asyncio.sleep(0)  # until the turns have taken their ends
        finally:
            self._receiving = None
