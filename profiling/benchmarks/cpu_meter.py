"""The CPU time of simulated actors and their clients, in one thread with the controller; the rest is its."""

import asyncio
import time
import types
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import Context, ContextVar
from typing import Any

_actor: ContextVar[str | None] = ContextVar("actor", default=None)
"""Kind of the actor that runs now; the tasks that it creates inherit it."""


class CpuMeter:
    """CPU seconds by kind of actor (`generator`, `scorer`, `buffer`, ...), and of all their clients (`client`).

    Each second counts once: work within other work is not that other work's.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._counted = 0.0  # seconds, of all kinds

    def begin(self) -> tuple[float, float]:
        """Begin to count; `end` takes what this returns."""
        return time.thread_time(), self._counted

    def end(self, kind: str, begun: tuple[float, float]) -> None:
        """Count the CPU time since `begin`, without what was counted meanwhile."""
        spent = time.thread_time() - begun[0]
        self.seconds[kind] += spent - (self._counted - begun[1])
        self._counted = begun[1] + spent

    async def metered(self, name: str, work: Awaitable[Any]) -> Any:
        """Do an actor's work, of which the time counts while it runs, not while it waits."""
        return await self._steps(name.partition("-")[0], work)

    @types.coroutine
    def _steps(self, kind: str, work: Awaitable[Any]) -> Generator[Any, Any, Any]:
        _actor.set(kind)
        steps: Any = work.__await__()
        resume, value = steps.send, None
        while True:
            begun = self.begin()
            try:
                waits_for = resume(value)
            except StopIteration as end:
                return end.value
            finally:
                self.end(kind, begun)
            try:
                value = yield waits_for
                resume = steps.send
            except BaseException as error:
                resume, value = steps.throw, error

    def make_task(
        self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
        context: Context | None = None,
    ) -> "asyncio.Task[Any]":  # fmt: skip
        """Make a task, as the loop's task factory; the time of one that an actor creates is the actor's."""
        kind = _actor.get() if context is None else context.get(_actor)
        assert asyncio.iscoroutine(work)
        counted = work if kind is None else self.metered(kind, work)
        return asyncio.Task(counted, loop=loop, context=context)

    def timer(self, name: str, callback: Callable[[], None]) -> Callable[[], None]:
        """Return the callback of an actor's timer, with its time counted."""
        kind = name.partition("-")[0]

        def run() -> None:
            begun = self.begin()
            callback()
            self.end(kind, begun)

        return run
