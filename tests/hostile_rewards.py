"""A user's reward functions that do whatever a response asks for; they run only in the pool's workers."""

import ctypes
import math
import os
import signal
import sys
import threading
import time
from mmap import mmap
from typing import Any


def obey(response: str, ground_truth: str) -> dict[str, float]:
    """Do what the response's first word asks for; return 1 if the rest is the ground truth."""
    word, _, answer = response.partition(" ")
    ACTIONS.get(word, lambda: None)()
    value = float((answer or word) == ground_truth)
    return {"reward": value, "format_reward": 1.0, "answer_reward": value}


def _loop() -> None:
    while True:
        pass


def _sleep_without_an_alarm() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.alarm(0)
    time.sleep(1000)


def _raise(error: BaseException) -> Any:
    raise error


def _keep() -> None:
    KEPT.append(mmap(-1, 150 * 2**20))


def _grow() -> None:
    while True:
        KEPT.append(bytearray(64 * 2**20))


def _recurse() -> None:
    _recurse()


def _print() -> None:
    print("to standard output", "x" * 100_000, flush=True)
    print("to standard error", "x" * 100_000, file=sys.stderr, flush=True)
    os.write(1, b"[" * 100_000)


KEPT: list[Any] = []
ENDLESS = {
    "loop": _loop,
    "sleep": _sleep_without_an_alarm,
    "binomial": lambda: math.comb(10**9, 5 * 10**8),  # no Python code can interrupt it
    "power": lambda: 10**10**10,
}
DEADLY = {
    "exit": lambda: os._exit(0),
    "exit-3": lambda: os._exit(3),
    "sys-exit": sys.exit,
    "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "allocate": lambda: bytearray(2**40),
    "grow": _grow,
    "close-all": lambda: os.closerange(0, 1000),
    "interrupt": lambda: _raise(KeyboardInterrupt()),
}
RAISING = {
    "raise": lambda: _raise(ValueError("a line\nand \ud800")),
    "long": lambda: _raise(ValueError("x" * 1_000_000)),
    "recurse": _recurse,
    "missing": lambda: {}["no such key"],
    "thread-error": lambda: _raise(threading.ThreadError()),
}
HARMLESS = {
    "print": _print,
    "close-stdin": lambda: sys.stdin.close(),
    "keep": _keep,
    "nap": lambda: time.sleep(0.05),
    "doze": lambda: time.sleep(0.3),
    "handle": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
}
ACTIONS: dict[str, Any] = {**ENDLESS, **DEADLY, **RAISING, **HARMLESS}
