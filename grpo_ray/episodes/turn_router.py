"""The way of an episode's turns to the Generators: to the one with the prefix, while it is not overloaded.

Turns to one Generator go out together, and come back together (turn_box.py). `ServingTime` limits them.
"""

import asyncio
import itertools
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from grpo_ray.engines.base import EngineDied
from grpo_ray.episodes.turn_box import FinishedTurns, Turn, Turns, Worker
from grpo_ray.errors import ActorDied, TurnLost, TurnUnanswered
from grpo_ray.types import Completion, SamplingSettings
from grpo_ray.watch.clock import monotonic
from grpo_ray.watch.event_loop import Changes

T = TypeVar("T")
ANSWER_S = 15.0  # for an answer to `ping`, twice
LOOK_S = 1.0  # between two looks at a clock that stands still
SLACK = 8  # turns by which the Generator with the prefix may be busier than the least busy one


class TurnClient(Protocol):
    """The part of a Generator's client that turns need (core/clients.py)."""

    def begin_turns(self, worker: Worker, turns: Turns, cancelled: Sequence[int]) -> Awaitable[None]: ...
    def finished_turns(self, worker: Worker) -> Awaitable[FinishedTurns]: ...
    def ping(self) -> Awaitable[None]: ...


class TurnLink:
    """One Generator's turns. An error of a call, such as the Generator's death, fails all of them.

    So does a Generator that has turns and finishes none for long; the clock of that time stands still while it
    has none. A single turn has no limit of its own, since it also waits for other turns and for weight syncs.
    """

    def __init__(self, client: TurnClient, worker: Worker, silence_s: float) -> None:
        """
        Args:
            worker: this process.
            silence_s: seconds with turns, none of which finishes, before all fail.
        """
        self.client, self._worker, self._silence_s = client, worker, silence_s
        self._clock = ServingTime(is_serving=False)
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
        self._clock.set(True)
        self._sending = self._sending or self._start(self._send)
        try:
            return await end
        finally:
            del self._waiting[number]
            self._clock.set(bool(self._waiting))
            if end.cancelled() and self._new.pop(number, None) is None:
                self._cancelled.append(number)
                self._sending = self._sending or self._start(self._send)

    def _start(self, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        async def run() -> None:
            try:
                await work()  # made here: the task may be cancelled before it begins
            except Exception as error:
                self._new, self._cancelled = {}, []
                for end in self._waiting.values():
                    if not end.done():
                        end.set_exception(error)

        return asyncio.create_task(run())

    async def _send(self) -> None:
        """Send what there is; what comes meanwhile goes out with the next call."""
        try:
            while self._new or self._cancelled:
                new, self._new, cancelled, self._cancelled = self._new, {}, self._cancelled, []
                sent = self.client.begin_turns(self._worker, new, cancelled)
                self._receiving = self._receiving or self._start(self._receive)
                await sent
                self.num_answers += 1
        finally:
            self._sending = None

    async def _receive(self) -> None:
        try:
            while self._waiting:
                finished = await self._finished()
                self.num_answers += 1
                for number, result in finished.ends.items():
                    if (end := self._waiting.get(number)) is not None and not end.done():
                        if isinstance(result, Exception):
                            end.set_exception(result)
                        else:
                            end.set_result(result)
                await asyncio.sleep(0)  # until the turns have taken their ends
        finally:
            self._receiving = None

    async def _finished(self) -> FinishedTurns:
        try:
            return await self._clock.within(self._silence_s, self.client.finished_turns(self._worker))
        except TimeoutError as error:
            silence = f"it had turns and finished none for {self._silence_s:g} s"
            raise TimeoutError(str(error) or silence) from error


class TurnRouter:
    """The Generators that serve, as one worker sees them. One that fails costs the turn, not the episode."""

    def __init__(self, name: str, silence_s: float) -> None:
        """
        Args:
            name: of the worker.
            silence_s: see `TurnLink`.
        """
        self._worker, self._silence_s = (name, uuid.uuid4().hex), silence_s
        self.served = ServingTime(is_serving=False)
        self._serving: dict[int, TurnLink] = {}  # by number: a replacement has another one
        self._failures: dict[int, str] = {}  # errors by number
        self._changes = Changes()  # of the two above

    async def serve(self, serving: Mapping[int, TurnClient]) -> None:
        """Send turns to these Generators from now on."""
        self._serving = {
            number: self._serving.get(number) or TurnLink(client, self._worker, self._silence_s)
            for number, client in serving.items()
            if number not in self._failures
        }
        self.served.set(bool(self._serving))
        self._changes.announce()

    async def failures(self, num_known: int) -> list[tuple[int, str]]:
        """Wait until more than `num_known` Generators have failed; return the others' numbers and errors."""
        await self._changes.until(lambda: len(self._failures) > num_known)
        return list(self._failures.items())[num_known:]

    async def choose(self, preferred: int | None) -> tuple[int, TurnLink]:
        """Wait until a Generator serves; return the one that the next turn goes to, by its number.

        Args:
            preferred: the number of the one that has the turn's prefix.
        """
        await self._changes.until(lambda: self._serving)
        loads = {number: link.num_turns for number, link in self._serving.items()}
        number = min(loads, key=lambda number: loads[number])
        if preferred in loads and loads[preferred] - loads[number] <= SLACK:
            number = preferred
        return number, self._serving[number]

    async def answers(self, number: int) -> bool:
        """Return whether a Generator serves, and answers; one that does not answer has failed."""
        if (link := self._serving.get(number)) is None:
            return False
        failure = f"does not answer (2 x {ANSWER_S:g} s), and the time of an episode ended in its turn"
        for _ in range(2):  # this loop may have stood still, and missed the first answer
            try:
                async with asyncio.timeout(ANSWER_S):
                    await link.client.ping()
                return True
            except TimeoutError:
                continue
            except Exception as error:  # also an engine's own
                failure = str(error)
                break
        self.fail(number, failure)
        return False

    def fail(self, number: int, error: str) -> None:
        """Send no more turns to this Generator, and report its error."""
        if number in self._serving:
            del self._serving[number]
            self.served.set(bool(self._serving))
            self._failures[number] = error
            self._changes.announce()


class RoutedSampler:
    """One session's sampler."""

    def __init__(self, router: TurnRouter) -> None:
        self._router = router
        self._has_prefix: int | None = None
        self._open_at: dict[object, int] = {}  # the Generators with turns that have not ended
        self.lost: TurnLost | None = None

    async def sample(self, prompt_token_ids: tuple[int, ...], settings: SamplingSettings) -> Completion:
        """Sample one completion.

        Raises:
            TurnLost: two Generators that had begun the turn have failed; the turn may be the cause.
        """
        call, preferred, num_lost = object(), self._has_prefix, 0
        while True:
            number, link = await self._router.choose(preferred)
            self._open_at[call], num_before = number, link.num_answers
            try:
                completion = await link.sample(prompt_token_ids, settings)
                break
            except (ActorDied, EngineDied, TimeoutError) as error:
                self._router.fail(number, str(error))
                num_lost += link.num_answers > num_before  # or else it was dead before it had the turn
                if num_lost == 2:
                    self.lost = TurnLost(f"two Generators failed with one turn; the second: {error}")
                    raise self.lost from error
        self._has_prefix = number
        del self._open_at[call]
        return completion

    async def ran_out_of_time(self) -> None:
        """Take the episode as lost, and not as too slow, if a Generator that does not answer has its turn."""
        if not all([await self._router.answers(number) for number in {*self._open_at.values()}]):
            self.lost = TurnUnanswered("a Generator failed with a turn, in which the time of an episode ended")


class ServingTime:
    """A clock that stands still while no Generator serves, since episodes can do nothing about that.

    A TurnLink has one, too: of the time in which a Generator has turns.
    """

    def __init__(self, is_serving: bool = True, now: Callable[[], float] = monotonic) -> None:
        self._now = now
        self._seconds = 0.0
        self._since = now() if is_serving else None

    @property
    def seconds(self) -> float:
        """Seconds in which a Generator has served so far."""
        return self._seconds + (0.0 if self._since is None else self._now() - self._since)

    def set(self, is_serving: bool) -> None:
        """Let the clock run from now on, or stop it."""
        self._seconds, self._since = self.seconds, self._now() if is_serving else None

    async def wait(self, work: "asyncio.Future[Any]", limit_s: float) -> bool:
        """Wait until the work is done, for at most `limit_s` on this clock; return True if it is done."""
        end = self.seconds + limit_s
        while not work.done() and (left_s := end - self.seconds) > 0:
            await asyncio.wait({work}, timeout=left_s if self._since is not None else max(left_s, LOOK_S))
        return work.done()

    async def within(self, limit_s: float, work: Awaitable[T]) -> T:
        """Return the result of the work, which is cancelled at the limit, or with the caller.

        Raises:
            TimeoutError: it was not done within `limit_s` on this clock.
        """
        working = asyncio.ensure_future(work)
        try:
            if not await self.wait(working, limit_s):
                raise TimeoutError
            return working.result()
        finally:
            working.cancel()
