"""The CPU time of simulated actors, which share one thread with the controller: the rest is its own."""

import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Generator
from typing import Any


class CpuMeter:
    """CPU seconds by kind of actor: `generator`, `scorer`, `buffer`, `weight_sync` or `learner`."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def metered(self, name: str, work: Awaitable[Any]) -> "_Metered":
        """Return an actor's work, of which the time counts while it runs, not while it waits."""
        return _Metered(self, name.partition("-")[0], work)

    def timer(self, name: str, callback: Callable[[], None]) -> Callable[[], None]:
        """Return the callback of an actor's timer, with its time counted."""
        kind = name.partition("-")[0]

        def run() -> None:
            began = time.thread_time()
            callback()
            self.seconds[kind] += time.thread_time() - began

        return run


class _Metered:
    def __init__(self, meter: CpuMeter, kind: str, work: Awaitable[Any]) -> None:
        self._meter, self._kind, self._work = meter, kind, work

    def __await__(self) -> Generator[Any, Any, Any]:
        steps: Any = self._work.__await__()
        resume, value = steps.send, None
        while True:
            began = time.thread_time()
            try:
                waits_for = resume(value)
            except StopIteration as end:
                return end.value
            finally:
                self._meter.seconds[self._kind] += time.thread_time() - began
            try:
                value = yield waits_for
                resume = steps.send
            except BaseException as error:
                resume, value = steps.throw, error
