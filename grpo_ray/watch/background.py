"""A thread for work that may hang, such as writing to a network file system that does not answer."""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar

from grpo_ray.watch.clock import is_simulated

T = TypeVar("T")
SLOW_S = 10.0  # for one job; beyond it `problem` says so


class BackgroundThread:
    """Jobs that run one after another, in the order of their submission; in simulated time at once.

    The thread is a daemon: neither the event loop nor the end of the process waits for a job that hangs, as
    both would for one in asyncio's own executor.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[tuple[str, Callable[[], object]] | None] = SimpleQueue()  # None ends the thread
        self._running: tuple[str, float] | None = None  # the job's name, and the time of its start
        self._error: str | None = None  # of the last job that failed
        self._is_abandoned = False
        self._thread = Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Number of jobs that have not begun."""
        return self._jobs.qsize()

    @property
    def busy_s(self) -> float:
        """Seconds for which the current job has been running; 0 without one."""
        running = self._running
        return 0.0 if running is None else time.monotonic() - running[1]

    def submit(self, what: str, job: Callable[[], object]) -> None:
        """Queue a job, and return at once; it handles its own errors. One that it does not is a `problem`."""
        if is_simulated():  # a thread would end at a moment of real time
            job()
        else:
            self._jobs.put((what, job))

    def call(self, what: str, job: Callable[[], T]) -> "Future[T]":
        """Queue a job, and return its future; a job that is cancelled before it begins does not run."""
        future: Future[T] = Future()
        self.submit(what, partial(settle, future, job))
        return future

    async def run(self, what: str, job: Callable[[], T]) -> T:
        """Run a job after those queued before it; return its result, or raise its error."""
        return job() if is_simulated() else await asyncio.wrap_future(self.call(what, job))

    def close(self, limit_s: float) -> bool:
        """Wait for all jobs, then end the thread; one that hangs is left behind, and no later one begins."""
        self._jobs.put(None)
        self._thread.join(limit_s)
        self._is_abandoned = True
        return not self._thread.is_alive()

    def problem(self) -> str | None:
        """Return a warning while one job takes long, and after one has failed."""
        running, seconds = self._running, self.busy_s
        if running is None or seconds < SLOW_S:
            return self._error
        return (
            f"{running[0]} has not been written for {seconds:.0f} s: the disk is slow, or hangs; "
            f"{self.num_waiting} more records wait in memory"
        )

    def _work(self) -> None:
        while (next_job := self._jobs.get()) is not None and not self._is_abandoned:
            what, job = next_job
            self._running = what, time.monotonic()
            try:
                job()
            except BaseException as error:  # a mistake, which must not end a run, nor the thread
                self._error = f"{what} has failed: {type(error).__name__}: {error}"
                logging.exception("%s has failed", what)
            self._running = None


def settle(future: "Future[T]", job: Callable[[], T]) -> None:
    """Do the job unless the future was cancelled before, and give it the result or the error."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(job())
    except BaseException as error:
        future.set_exception(error)
