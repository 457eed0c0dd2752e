"""Delivery of messages to a tracker in its own thread, so that a slow or broken one delays nothing else."""

import time
from collections.abc import Callable
from functools import partial

from grpo_ray.config.secrets import SECRET_VALUE
from grpo_ray.watch.background import BackgroundThread
from grpo_ray.watch.trackers.tracker import End, TrackedRun, Tracker

Message = Callable[[Tracker], None]
MAX_WAITING = 1000  # messages
SLOW_S = 60.0  # for one message; beyond it the run shows a warning


class Delivery:
    """One tracker, its thread, and its queue of messages; `announce` shows a line of text, in the thread."""

    def __init__(
        self, name: str, tracker: Tracker, run: TrackedRun, announce: Callable[[str], None],
        max_waiting: int = MAX_WAITING,
    ) -> None:  # fmt: skip
        self.name = name
        self.num_dropped = 0
        self._tracker, self._run, self._announce = tracker, run, announce
        self._max_waiting = max_waiting
        self._failure: str | None = None
        self._is_failure_taken = False
        self._thread = BackgroundThread(f"tracker-{name}")
        self._submit(self._start)

    def send(self, message: Message) -> None:
        """Queue the message, or drop it if the queue is full; return at once."""
        if self._failure is not None:
            return
        if self._is_full():
            self.num_dropped += 1
        else:
            self._submit(message)

    def take_failure(self) -> str | None:
        """Return, once, why the tracker was turned off."""
        if self._is_failure_taken or self._failure is None:
            return None
        self._is_failure_taken = True
        return f"{self.name}: {self._failure}; the run continues without it"

    def problem(self) -> str | None:
        """Return a warning while the tracker does not keep up."""
        if self._failure is not None:
            return None
        if self.num_dropped and self._is_full():
            return f"{self.name} does not keep up: {self._dropped()}"
        seconds, waiting = self._thread.busy_s, self._thread.num_waiting
        if not seconds or seconds < SLOW_S:
            return None
        return f"{self.name} has not answered for {seconds:.0f} s; {waiting} messages are queued"

    def begin_to_close(self, end: End) -> None:
        """Close the tracker after the queued messages."""
        self._submit(lambda tracker: tracker.close(end))

    def close(self, deadline: float) -> str | None:
        """Wait until everything is sent, to a deadline of `time.monotonic`; return what went wrong."""
        if not self._thread.close(max(0.0, deadline - time.monotonic())):  # it lives until the process ends
            return f"{self.name}: not everything could be sent in tracking.close_timeout_s"
        return self.take_failure() or (f"{self.name}: {self._dropped()}" if self.num_dropped else None)

    def _is_full(self) -> bool:
        return self._thread.num_waiting >= self._max_waiting

    def _dropped(self) -> str:
        return f"{self.num_dropped} messages were dropped"

    def _start(self, tracker: Tracker) -> None:
        self._run.folder.mkdir(parents=True, exist_ok=True)
        original = self._run.original
        more = f" (a new run there, as this folder is a copy of {original})" if original else ""
        self._announce(f"{self.name}: {_without_password(tracker.start(self._run))}{more}")

    def _submit(self, message: Message) -> None:
        self._thread.submit(self.name, partial(self._deliver, message))

    def _deliver(self, message: Message) -> None:
        if self._failure is not None:  # the tracker is off
            return
        try:
            message(self._tracker)
        except BaseException as error:  # SystemExit too, which nothing else would report
            self._failure = _without_password(" ".join(f"{type(error).__name__}: {error}".split()))


def _without_password(text: str) -> str:
    """Return the text without the password that a server's address may contain."""
    return SECRET_VALUE.sub("://", text)
