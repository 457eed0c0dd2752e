"""The cores of one machine, shared by simulated actors: each busy actor works at the same rate.

Under processor sharing (https://en.wikipedia.org/wiki/Processor_sharing) one count is enough: the seconds of
work that each busy actor has been given by now. Work of w seconds that begins at count c ends at count c + w,
whatever else begins or ends meanwhile, so a change of the rate moves no actor's end in that count.
"""

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

ROUNDING_S = 1e-9


class Timer(Protocol):
    """A callback that is due after some work."""

    def cancel(self) -> None: ...


class Cores:
    """Cores on which a second of work takes a second: each actor has all that it uses, as on a cluster."""

    def work_time(self) -> float:
        """Return the seconds of work that an actor has been given that was busy ever since."""
        return asyncio.get_running_loop().time()

    def call_later(self, work_s: float, callback: Callable[[], None]) -> Timer:
        """Call back after `work_s` seconds of a busy actor's work."""
        return asyncio.get_running_loop().call_later(work_s, callback)

    def change_busy(self, change: float) -> None:
        """Account for cores that an actor keeps busy from now on; for fewer, if negative."""

    async def work(self, work_s: float) -> None:
        """Work on one core until `work_s` seconds are done."""
        await asyncio.sleep(work_s)


@dataclass(eq=False)
class _SharedTimer:
    callback: Callable[[], None]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


class SharedCores(Cores):
    """Cores of which busy actors get equal parts, none more than it uses."""

    def __init__(self, num_cores: float) -> None:
        self._num_cores, self._num_busy = num_cores, 0.0
        self._count = self._counted_at = 0.0
        self._timers: list[tuple[float, int, _SharedTimer]] = []  # a heap by count; the number breaks ties
        self._num_timers = 0
        self._next: asyncio.TimerHandle | None = None

    @property
    def rate(self) -> float:
        """Seconds of work per second, of each busy actor."""
        return min(1.0, self._num_cores / self._num_busy) if self._num_busy > 0 else 1.0

    def work_time(self) -> float:
        now = asyncio.get_running_loop().time()
        self._count += (now - self._counted_at) * self.rate
        self._counted_at = now
        return self._count

    def call_later(self, work_s: float, callback: Callable[[], None]) -> Timer:
        timer = _SharedTimer(callback)
        self._num_timers += 1
        heapq.heappush(self._timers, (self.work_time() + work_s, self._num_timers, timer))
        self._wait()
        return timer

    def change_busy(self, change: float) -> None:
        self.work_time()  # at the old rate
        self._num_busy += change
        self._wait()

    async def work(self, work_s: float) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.change_busy(1.0)
        timer = self.call_later(work_s, lambda: None if done.done() else done.set_result(None))
        try:
            await done
        finally:
            timer.cancel()
            self.change_busy(-1.0)

    def _wait(self) -> None:
        """Wait for the next timer at the current rate."""
        if self._next is not None:
            self._next.cancel()
            self._next = None
        while self._timers and self._timers[0][2].is_cancelled:
            heapq.heappop(self._timers)
        if self._timers:
            delay_s = max(0.0, self._timers[0][0] - self.work_time()) / self.rate
            self._next = asyncio.get_running_loop().call_later(delay_s, self._ring)

    def _ring(self) -> None:
        self._next = None
        now = self.work_time()
        while self._timers and self._timers[0][0] <= now + ROUNDING_S:
            _, _, timer = heapq.heappop(self._timers)
            if not timer.is_cancelled:
                timer.callback()
        self._wait()


def cores_of(num_cores: float | None) -> Cores:
    return Cores() if num_cores is None else SharedCores(num_cores)
