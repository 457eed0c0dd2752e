"""An observer of the user's code during a play: exceptions, calls that block, clocks, what is left open."""

import asyncio
import contextlib
import contextvars
import datetime
import itertools
import os
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

import psutil

import grpo_ray
from grpo_ray.episodes.outcome import EpisodeEnded

CLOCK_NAMES = "time time_ns monotonic monotonic_ns perf_counter perf_counter_ns process_time"
CLOCKS = {getattr(time, name): name for name in CLOCK_NAMES.split()}
BLOCKING = {time.sleep: "time.sleep", os.waitpid: "os.waitpid", os.system: "os.system", input: "input"}
AT_ONCE = ("_internal_poll",)  # functions of subprocess that ask for an end without waiting for it
SOCKET_CALLS = ("recv", "recv_into", "connect", "accept", "sendall")
QUIET = (EpisodeEnded, StopIteration, StopAsyncIteration, GeneratorExit, asyncio.CancelledError)
JUMP_S = 1000.0
ASYNCIO = f"{os.path.dirname(asyncio.__file__)}{os.sep}"
PACKAGE = f"{os.path.dirname(grpo_ray.__file__)}{os.sep}"


class Watch:
    """An observer of the code in some folders, in this process."""

    def __init__(self, folders: Collection[str], modules: Sequence[ModuleType]) -> None:
        self._folders = tuple(f"{folder}{os.sep}" for folder in folders)
        self._files = {os.path.realpath(str(module.__file__)) for module in modules}
        self._is_own: dict[str, bool] = {}
        self._loop_thread = threading.get_ident()
        self.caught = contextvars.ContextVar[list[tuple[str, str]]]("exceptions of the episode that runs now")
        self.blocking = Counter[tuple[str, str]]()
        self.drawn: list[tuple[str, str]] = []

    def is_own(self, file: str) -> bool:
        """Return True for a file of the user's: a target's module, or one beside it that is not installed."""
        if file not in self._is_own:
            real = os.path.realpath(file)
            installed = "site-packages" in real or file.startswith((PACKAGE, "<"))
            beside = real.startswith(self._folders) and not installed
            self._is_own[file] = real in self._files or beside
        return self._is_own[file]

    def place_of(self, frame: FrameType | None, through_package: bool = False) -> str:
        """Return file:line of the innermost frame that is the user's; empty if none is.

        Args:
            through_package: also of a frame that called the package, or asyncio.
        """
        while frame is not None and not self.is_own(file := frame.f_code.co_filename):
            if not through_package and file.startswith((PACKAGE, ASYNCIO)):
                return ""
            frame = frame.f_back
        return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"

    @contextlib.contextmanager
    def noting(self, what: str | None) -> Iterator[None]:
        """Note `exceptions` in the user's code, for their episode; or `calls` that wait or read clocks."""
        before = sys.gettrace(), threading.gettrace(), sys.getprofile(), threading.getprofile()
        if what == "exceptions":
            threading.settrace(self._enter)
            sys.settrace(self._enter)
        elif what == "calls":
            threading.setprofile(self._on_call)
            sys.setprofile(self._on_call)
        try:
            yield
        finally:
            setters: Any = sys.settrace, threading.settrace, sys.setprofile, threading.setprofile
            for put, earlier in zip(setters, before, strict=True):  # of a debugger, or of a coverage tool
                put(earlier)

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._on_event if self.is_own(frame.f_code.co_filename) else None

    def _on_event(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "exception" and not issubclass(arg[0], QUIET):
            said = f"{arg[0].__name__}: {str(arg[1])[:100]}".rstrip(": ")
            with contextlib.suppress(LookupError):
                self.caught.get().append((said, self.place_of(frame)))
        return self._on_event

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> None:
        if event != "c_call":
            return
        try:
            drawn, blocking = _drawn(arg), _blocking(arg, frame)
        except TypeError:  # not hashable
            return
        if blocking is not None and threading.get_ident() == self._loop_thread:
            if place := self.place_of(frame):
                self.blocking[blocking, place] += 1
        elif drawn is not None and (place := self.place_of(frame)) and (drawn, place) not in self.drawn:
            self.drawn.append((drawn, place))

    # ---- what is left ----

    def left_open(self) -> dict[str, int]:
        """Count this process's open files, and threads that would keep it alive."""
        threads = [thread for thread in threading.enumerate() if not thread.name.startswith("asyncio_")]
        return {"open files, sockets or pipes": psutil.Process().num_fds(), "threads": len(threads)}

    def left_since(self, before: Mapping[str, int], num_episodes: int) -> list[str]:
        """Return what has been left: each process, and files or threads if every fourth episode leaves one."""
        found = []
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if child.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"process {' '.join(child.cmdline())[:100] or child.name()}")
        for what, count in self.left_open().items():
            if count - before[what] >= max(4, num_episodes // 4):
                found.append(f"{count - before[what]} {what} after {num_episodes} episodes")
        return found


def _drawn(called: Any) -> str | None:
    """Return the name of a read of a clock or of Python's random numbers."""
    if called in CLOCKS:
        return f"time.{CLOCKS[called]}"
    name, owner = getattr(called, "__name__", ""), getattr(called, "__self__", None)
    if name in ("now", "utcnow", "today") and isinstance(owner, type) and issubclass(owner, datetime.date):
        return f"datetime.{name}"
    is_random = name in ("random", "getrandbits") and isinstance(owner, random.Random)
    return "random" if is_random or called is os.urandom else None


def _blocking(called: Any, frame: FrameType) -> str | None:
    """Return the name of a call that holds up the thread until something happens."""
    if called in BLOCKING:
        return None if frame.f_code.co_name in AT_ONCE else BLOCKING[called]
    owner = getattr(called, "__self__", None)
    if isinstance(owner, socket.socket) and called.__name__ in SOCKET_CALLS and owner.gettimeout() != 0:
        return f"socket.{called.__name__}"
    return None


def shift_clocks(modules: Sequence[ModuleType]) -> None:
    """Replace the clocks in the modules' globals by ones that jump ahead whenever they are read."""
    jumps = itertools.count(JUMP_S, JUMP_S)

    def jumping(clock: Callable[[], Any], unit: float) -> Callable[[], Any]:
        return lambda: clock() + type(clock())(next(jumps) * unit)

    class Later(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:
            return datetime.datetime.now(tz) + datetime.timedelta(seconds=next(jumps))

        today = utcnow = now

    shifted = {clock: jumping(clock, 1e9 if name.endswith("_ns") else 1.0) for clock, name in CLOCKS.items()}
    by_name = {CLOCKS[clock]: read for clock, read in shifted.items()}
    for module in modules:
        for name, value in [*vars(module).items()]:
            if value is time:
                setattr(module, name, SimpleNamespace(**vars(time) | by_name))
            elif value is datetime:
                setattr(module, name, SimpleNamespace(**vars(datetime) | {"datetime": Later}))
            elif value is datetime.datetime:
                setattr(module, name, Later)
            elif any(value is clock for clock in CLOCKS):
                setattr(module, name, shifted[value])
