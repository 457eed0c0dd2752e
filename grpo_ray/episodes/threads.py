"""Threads for episode functions: one that blocks its event loop stops no other group's, nor the worker.

Sessions stay on the worker's own loop, so their state needs no lock; a thread's episodes call it from there.
"""

import asyncio
import contextlib
import inspect
import math
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from grpo_ray.episodes.outcome import Outcome
from grpo_ray.episodes.session import Session
from grpo_ray.watch.background import settle

T = TypeVar("T")
WIND_DOWN_S = 5.0  # for a stopped thread that nothing holds up; many stop at the same time


class EpisodeThread:
    """An event loop in a thread of its own, from its first use to `stop`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._is_stopping = False
        self._told_at = math.inf  # the time of the call of `stop`

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The thread's loop; a group that waits for its place has none, for it holds three open files.

        Raises:
            RuntimeError: the system starts no further thread.
            OSError: it opens no further file.
        """
        if self._loop is None:
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=self._run, args=(loop,), name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                loop.close()
                raise
            self._loop, self._thread = loop, thread
        return self._loop

    def stop(self) -> None:
        """End the thread once the code that runs in it lets go; this does not wait."""
        self._told_at = time.monotonic()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop, self._loop)

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_stuck(self) -> bool:
        """True if it has not come back from a call long after it was told to stop.

        However many calls of `asyncio.to_thread` hang that its episodes began, one thread is stuck.
        """
        return self.is_alive and time.monotonic() - self._told_at >= WIND_DOWN_S

    def _stop(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_stopping = True
        loop.stop()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        loop.set_default_executor(calls := _Calls())
        try:
            while not self._is_stopping:
                # Of a task that an episode began; its awaiter gets it, too.
                with contextlib.suppress(SystemExit, KeyboardInterrupt):
                    loop.run_forever()
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
            while calls.open:  # this thread is alive, and counted, while a call hangs
                open_calls = (asyncio.wrap_future(call, loop=loop) for call in tuple(calls.open))
                loop.run_until_complete(asyncio.gather(*open_calls, return_exceptions=True))
        finally:
            loop.close()


class _Calls(ThreadPoolExecutor):
    """A daemon thread per call of `asyncio.to_thread`: one that hangs does not keep the process from ending."""

    def __init__(self) -> None:
        super().__init__()
        self.open: set[Future[Any]] = set()

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        call = partial(function, *args, **kwargs)
        threading.Thread(target=settle, args=(future, call), daemon=True).start()
        self.open.add(future)
        future.add_done_callback(self.open.discard)
        return future


class RunningEpisode:
    """An episode function that runs, here or in a thread; `done` has its result, on the caller's loop.

    It is an error if the thread cannot start.
    """

    def __init__(
        self, episode: Coroutine[Any, Any, float | Outcome], thread: EpisodeThread | None = None
    ) -> None:
        here = asyncio.get_running_loop()
        try:
            self._loop = here if thread is None else thread.loop
        except (RuntimeError, OSError) as error:
            episode.close()
            self._loop, episode = here, _no_thread(error)
        self._task: asyncio.Task[float | Outcome] | None = None
        self.done = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._run(episode), self._loop))

    async def _run(self, episode: Coroutine[Any, Any, float | Outcome]) -> float | Outcome:
        self._task = asyncio.current_task()
        return await episode

    def cancel(self) -> None:
        """Cancel the episode; `done` follows when it has ended."""
        asyncio.run_coroutine_threadsafe(self._cancel(), self._loop)

    async def _cancel(self) -> None:
        assert self._task is not None, "calls arrive in order"
        self._task.cancel()


async def _no_thread(error: Exception) -> Outcome:
    raise RuntimeError(
        f"the thread of the group's episodes could not start ({error}): raise the limits of threads and open "
        "files (ulimit -u, ulimit -n), or lower episodes.max_concurrent"
    ) from error


class SessionElsewhere:
    """A session for an episode function in another thread than the session's own, where its calls run."""

    def __init__(self, session: Session) -> None:
        self._session, self._home = session, asyncio.get_running_loop()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._session, name)

        async def at_home(*args: Any, **kwargs: Any) -> Any:
            call = asyncio.run_coroutine_threadsafe(found(*args, **kwargs), self._home)
            return await asyncio.wrap_future(call)

        return at_home if inspect.iscoroutinefunction(found) else found
