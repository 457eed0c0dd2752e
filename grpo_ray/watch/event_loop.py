"""The driver's event loop: many calls that do not hold it up, changes to wait for, and its delay.

Sending a call to a Ray actor takes the caller about half a millisecond, so a thousand calls in one turn of the
event loop would delay everything else by half a second. All calls are under way at the same time nevertheless.
"""

import asyncio
import math
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
PER_TURN = 32  # calls begun per turn of the event loop
EVERY_S = 0.25  # between two rings of the timer that measures the delay
MAX_DELAYS = 10_000  # kept between two readings


async def gathered(work: Iterable[Awaitable[T]]) -> list[T]:
    """Begin all work, a few per turn; once all has ended, return every result in order, or raise an error.

    If this is cancelled, all that has begun is cancelled, and nothing more begins.
    """
    begun: list[asyncio.Future[T]] = []
    try:
        for each in work:
            begun.append(asyncio.ensure_future(each))
            await breathe(len(begun))
        await asyncio.gather(*begun, return_exceptions=True)
    except BaseException:
        for task in begun:
            task.cancel()
        raise
    return [task.result() for task in begun]


class TasksAlongside(asyncio.TaskGroup):
    """Tasks alongside a block: those left at its end are cancelled, and an error of one ends all."""

    _is_over = False

    def __init__(self) -> None:
        super().__init__()
        self._begun = weakref.WeakSet[asyncio.Task[Any]]()

    def create_task(self, *work: Any, **options: Any) -> asyncio.Task[Any]:
        self._begun.add(task := super().create_task(*work, **options))
        if self._is_over:  # begun by one that ends
            task.cancel()
        return task

    async def __aexit__(self, *error: Any) -> None:
        self._is_over = True
        for task in self._begun if error[0] is None else ():
            task.cancel()
        await super().__aexit__(*error)


class FanOut:
    """Turns of tasks that wake together to send a call each: `PER_TURN` go on per turn of the event loop."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def turn(self) -> None:
        """Wait for a turn of the event loop with room for one more; first come, first served."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._release, loop)
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _release(self, loop: asyncio.AbstractEventLoop) -> None:
        for _ in range(min(PER_TURN, len(self._waiting))):
            turn = self._waiting.popleft()
            if not turn.done():  # else it was cancelled
                turn.set_result(None)
        if self._waiting:
            loop.call_soon(self._release, loop)


async def breathe(num_begun: int) -> None:
    """Let others run after every `PER_TURN` calls."""
    if num_begun % PER_TURN == 0:
        await asyncio.sleep(0)


class Changes:
    """Changes of one state, in one event loop."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def announce(self) -> None:
        self._next.set()
        self._next = asyncio.Event()

    def next(self) -> Coroutine[Any, Any, object]:
        """Return the wait for the next change after this call, however late the wait begins."""
        return self._next.wait()

    async def until(self, condition: Callable[[], T | None]) -> T:
        """Wait until the condition is true, and return its value; it is checked again after each change."""
        while not (value := condition()):
            await self.next()
        return value


class LoopLag:
    """Delays of a timer that rings at equal intervals; it ends with its event loop."""

    def __init__(self) -> None:
        self._delays: deque[float] = deque(maxlen=MAX_DELAYS)

    def start(self) -> None:
        """Begin to measure, on the running event loop."""
        loop = asyncio.get_running_loop()
        due = loop.time() + EVERY_S

        def ring() -> None:
            self._delays.append(max(0.0, loop.time() - due))
            self.start()

        loop.call_at(due, ring)

    def take(self) -> dict[str, float]:
        """Return the 99th percentile of the delays since the last reading, which then begins anew.

        It is the longest delay of fewer than a hundred. There is none if the timer has not rung.
        """
        delays = sorted(self._delays)
        self._delays.clear()
        return {"perf/loop_lag_s": delays[math.ceil(0.99 * len(delays)) - 1]} if delays else {}
