"""A user's reward functions that do whatever a response asks for; they run only in the pool's workers."""

import contextlib
import ctypes
import math
import os
import signal
import socket
import stat
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


def _grow() -> None:
    while True:
        KEPT.append(bytearray(64 * 2**20))


def _recurse() -> None:
    _recurse()


def _print() -> None:
    print("to standard output", "x" * 100_000, flush=True)
    print("to standard error", "x" * 100_000, file=sys.stderr, flush=True)
    os.write(1, b"[" * 100_000)


def _channel() -> socket.socket:
    """Find the worker's socket to the pool."""
    for number in range(3, 256):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, os.dup(number))
    raise AssertionError("the worker has no channel")


def _flood() -> None:
    channel = _channel()
    while True:
        channel.sendall(b"x" * 2**16)


def _fill() -> None:
    channel = _channel()
    channel.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            channel.send(b"x" * 2**10)
    os._exit(0)


def _later(action: Any) -> None:
    """Act while the worker waits for the next answer."""
    signal.signal(signal.SIGALRM, lambda *_: action())
    signal.setitimer(signal.ITIMER_REAL, 0.2)


def _forget() -> None:
    """Pretend that no answer was begun, and end."""
    frame = sys._getframe()
    while "num_begun" not in frame.f_locals:
        assert frame.f_back is not None
        frame = frame.f_back
    frame.f_locals["num_begun"][:] = bytes(8)
    os._exit(0)


def _forge(line: bytes) -> Any:
    return lambda: _channel().sendall(line + b"\n")


SCORES = b'["results", [["scores", {"reward": %s, "format_reward": 1, "answer_reward": %s}]]]'
FORGERIES = {
    "no-json": b"garbage",
    "no-text": b"\xff\xfe",
    "nested": b"[" * 60_000,
    "empty": b"[]",
    "number": b"5",
    "unknown": b'["hello", "x"]',
    "unhashable": b'[["scores"], {}]',
    "results-in-results": b'["results", [' * 400 + b"]]" * 400,
    "no-list": b'["results", [{"error": 1, "x": 2}]]',
    "missing": b'["results", [["scores", {"reward": 1}]]]',
    "no-scores": b'["results", [["scores", [1, 1, 1]]]]',
    "of-text": SCORES % (b'"1"', b"1"),
    "true": SCORES % (b"true", b"1"),
    "nan": SCORES % (b"NaN", b"1"),
    "infinite": SCORES % (b"1e999", b"1"),
    "too-large": SCORES % (b"1e300", b"1"),
    "digits": SCORES % (b"9" * 400, b"1"),
    "many-digits": SCORES % (b"9" * 5000, b"1"),
    "half": SCORES % (b"1", b"0.5"),
    "unknown-score": SCORES % (b"1", b'1, "other": 1'),
    "null": b'["results", [["error", null]]]',
    "ready": b'["ready", 1]',
    "failed": b'["failed", "x"]',
    "ended-short": b'["ended"]',
    "ended-types": b'["ended", 1, 2, 3]',
}
KEPT: list[Any] = []
ENDLESS = {
    "loop": _loop,
    "sleep": _sleep_without_an_alarm,
    "binomial": lambda: math.comb(10**9, 5 * 10**8),  # no Python code can interrupt it
    "power": lambda: 10**10**10,
}
UNGRADABLE = {
    **ENDLESS,
    "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "allocate": lambda: bytearray(2**40),
    "grow": _grow,
}
DEADLY = {
    "exit": lambda: os._exit(0),
    "exit-3": lambda: os._exit(3),
    "sys-exit": sys.exit,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
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
    "keep": lambda: KEPT.append(mmap(-1, 150 * 2**20)),
    "nap": lambda: time.sleep(0.05),
    "doze": lambda: time.sleep(0.3),
    "handle": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
}
TAKEN_OVER = {
    "flood": _flood,
    "fill": _fill,
    "fill-later": lambda: _later(_fill),
    "deaf-later": lambda: _later(_sleep_without_an_alarm),
    "forget": _forget,
    "real-time-signal": lambda: os.kill(os.getpid(), 35),
    "forge-right": lambda: _forge(SCORES % (b"1", b"1"))(),
    **{f"forge-{name}": _forge(line) for name, line in FORGERIES.items()},
}
ACTIONS: dict[str, Any] = {**UNGRADABLE, **DEADLY, **RAISING, **HARMLESS, **TAKEN_OVER}
