"""SIGINT and SIGTERM whatever the main thread is doing: real processes, without Ray."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grpo_ray.run import signals

BEGIN = """
import asyncio, ctypes, sys, time
from pathlib import Path
from grpo_ray.run import signals
from grpo_ray.records.run_files import RunDirectory

run = RunDirectory(sys.argv[1])
"""
SWALLOWS = """
with signals.signals_answered(run):
    said = "ready"
    while True:
        try:
            print(said, flush=True)
            time.sleep(1000)
        except KeyboardInterrupt:
            said = "first"
"""
NATIVE = """
signals.ANSWER_S = 0.1
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
with signals.signals_answered(run):
    libc.pthread_mutex_lock(mutex)
    print("ready", flush=True)
    libc.pthread_mutex_lock(mutex)  # for ever, and no signal interrupts it
"""
DEAF_LOOP = """
class Controller:
    was_stopped = False

    async def run(self):
        print("ready", flush=True)
        while True:
            time.sleep(0.01)  # the event loop never gets to the first signal

with signals.signals_answered(run):
    signals.run_until_signal(Controller(), 1000.0, run)
"""
LONG_STEP = """
class Controller:
    was_stopped = False

    def stop(self, is_preempted):
        self.was_stopped = True

    async def run(self):
        print("ready", flush=True)
        await asyncio.sleep(1000)  # a step that does not end

with signals.signals_answered(run):
    signals.run_until_signal(Controller(), 1000.0, run, say=lambda text: print(text, flush=True))
"""
INTERRUPTED = """
try:
    with signals.signals_answered(run):
        print("ready", flush=True)
        time.sleep(1000)
except KeyboardInterrupt:
    print("cleaned up", flush=True)
    sys.exit(130)
"""


def started(program: str, folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN + program, str(folder)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate()[1]
    return process


def ending(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    output, errors = process.communicate(timeout=120)
    return process.returncode, output, errors


def ended_at_once(folder: Path) -> str:
    return f"\nended at once, without waiting any longer; resume with: grpo-ray resume {folder}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").touch()  # a run that can be resumed
    return tmp_path


@pytest.mark.parametrize(
    ("numbers", "num_endings"),
    [
        ([], 0),
        ([signal.SIGINT], 0),
        ([signal.SIGINT, signal.SIGTERM], 1),
        ([signal.SIGCHLD, signal.SIGTERM, signal.SIGCHLD], 0),
    ],
)
def test_the_watch_ends_the_process_at_the_second_signal_that_stops_a_run(
    numbers: list[int], num_endings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the signals have come before the watch looks, and the run is over right after them."""
    ended: list[str] = []
    monkeypatch.setattr(signals, "_end_process", lambda what, run: ended.append(what))
    watched, ours = socket.socketpair()
    with watched:
        ours.send(bytes(numbers))
        ours.close()
        signals._watch(watched, None)
    assert len(ended) == num_endings


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_first_signal_interrupts_the_main_thread(number: int, folder: Path) -> None:
    process = started(INTERRUPTED, folder)
    process.send_signal(number)
    assert ending(process) == (130, "cleaned up\n", "")


@pytest.mark.slow
def test_a_run_that_has_no_folder_yet_is_not_said_to_resume(folder: Path) -> None:
    process = started(SWALLOWS, folder / "none")
    os.kill(process.pid, signal.SIGINT)
    os.kill(process.pid, signal.SIGTERM)
    status, _, errors = ending(process)
    assert status == 130
    assert errors.endswith("\nended at once, without waiting any longer\n")


@pytest.mark.slow
def test_a_main_thread_in_native_code_is_ended_by_the_first_signal(folder: Path) -> None:
    process = started(NATIVE, folder)
    time.sleep(1.0)  # between its last line and the call, Python answers
    process.send_signal(signal.SIGINT)
    status, _, errors = ending(process)
    assert status == 130
    assert "ended at once, because it did not answer within 0.1 s; resume with: " in errors


@pytest.mark.slow
def test_an_event_loop_that_is_busy_is_ended_by_two_signals(folder: Path) -> None:
    process = started(DEAF_LOOP, folder)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)  # another one: two of a kind may be delivered as one
    assert ending(process)[::2] == (130, ended_at_once(folder))


@pytest.mark.slow
def test_the_first_ctrl_c_says_what_is_waited_for_and_the_second_ends_the_run_at_once(folder: Path) -> None:
    process = started(LONG_STEP, folder)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    first = process.stdout.readline()
    assert "waiting for the end of this step" in first
    assert "Ctrl-C again ends the run at once" in first
    process.send_signal(signal.SIGINT)
    status, output, errors = ending(process)
    assert (status, output) == (130, "")
    assert errors == ended_at_once(folder)
