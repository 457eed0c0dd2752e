"""SIGINT and SIGTERM whatever the main thread is doing: real processes, without Ray."""

import multiprocessing
import os
import signal
import socket
import time
from pathlib import Path

import pytest
from builders import TinyModel

from grpo_ray.run import signals

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["grpo_ray.run.signals"])  # once, as it takes seconds
BEGIN = """
import asyncio, ctypes, os, signal, sys, time
from pathlib import Path
from grpo_ray.run import signals
from grpo_ray.records.run_files import RunDirectory

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup pytest` ignores it
for number, name in enumerate(("output", "errors"), 1):
    os.dup2(os.open(folder.with_name(name), os.O_CREAT | os.O_WRONLY), number)
run = RunDirectory(folder)
"""
NATIVE = """
signals.ANSWER_S = 0.1
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
with signals.signals_answered(run):
    libc.pthread_mutex_lock(mutex)
    print("ready", flush=True)
    libc.pthread_mutex_lock(mutex)  # for ever, and no signal interrupts it
"""
LONG_STEP = """
class Controller:
    was_stopped = False

    def stop(self, is_preempted):
        self.was_stopped = print("stopped", flush=True) is None

    async def run(self):
        print("ready", flush=True)
        while True:  # a step that does not end
            time.sleep(0.01) if is_deaf else await asyncio.sleep(1000)

with signals.signals_answered(run):
    hang = lambda text: print(text, flush=True) or time.sleep(1000)  # as a terminal may
    signals.run_until_signal(Controller(), 1000.0, run, say=hang)
"""
INTERRUPTED = """
try:
    with signals.signals_answered(run):
        print("ready", flush=True)
        type("Slow", (), {"__del__": lambda self: time.sleep(1000)})()  # out of which nothing is raised
        while True: time.sleep(0.01)
except KeyboardInterrupt:
    print("cleaned up", flush=True)
    sys.exit(130)
"""
ON_A_HUNG_DISK = """
import hung_disk_cli
sys.exit(hung_disk_cli.main(folder, overrides))
"""
ENDED_AT_ONCE = "\nended at once, without waiting any longer"


class Started:
    """A process that runs a program, and is ready for signals."""

    def __init__(self, program: str, folder: Path, sign: str = "ready", **names: object) -> None:
        self._folder = folder
        given = BEGIN + program, {"folder": folder, **names}
        self._process = FORKS.Process(target=exec, args=given, daemon=True)
        self._process.start()
        self.wait_for(sign)

    def wait_for(self, text: str) -> None:
        while text not in self._text("output"):
            assert self._process.is_alive(), self._text("errors")
            time.sleep(0.01)

    def send(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def ending(self) -> tuple[int | None, str, str]:
        self._process.join(120)
        status = self._process.exitcode
        self._process.kill()  # or it would be waited for at the end of all tests
        return status, self._text("output"), self._text("errors")

    def _text(self, name: str) -> str:
        path = self._folder.with_name(name)
        return path.read_text() if path.exists() else ""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()  # a run that can be resumed
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("numbers", "num_endings"),
    [
        ([], 0),
        ([signal.SIGINT], 0),
        ([signal.SIGINT, signal.SIGTERM], 1),
        ([signal.SIGCHLD, signal.SIGTERM, signal.SIGCHLD], 0),
        ([signal.SIGHUP, signal.SIGHUP], 0),  # of a terminal that closes: by the shell, and by the kernel
        ([signal.SIGHUP, signal.SIGINT], 1),
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
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.kept("1", "2")
def test_a_first_signal_interrupts_the_main_thread(number: int, folder: Path) -> None:
    process = Started(INTERRUPTED, folder)
    process.send(number)
    assert process.ending() == (130, "ready\ncleaned up\n", "")


@pytest.mark.slow
def test_a_main_thread_in_native_code_is_ended_by_the_first_signal(folder: Path) -> None:
    process = Started(NATIVE, folder)
    time.sleep(1.0)  # between its last line and the call, Python answers
    process.send(signal.SIGINT)
    status, _, errors = process.ending()
    assert status == 130
    assert "ended at once, because it did not answer within 0.1 s; resume with: " in errors


@pytest.mark.slow
def test_an_event_loop_that_is_busy_is_ended_by_two_signals(folder: Path) -> None:
    process = Started(LONG_STEP, folder, is_deaf=True)
    process.send(signal.SIGINT)
    process.send(signal.SIGTERM)  # another one: two of a kind may be delivered as one
    assert process.ending()[::2] == (130, f"{ENDED_AT_ONCE}; resume with: grpo-ray resume {folder}\n")


@pytest.mark.slow
@pytest.mark.parametrize("has_begun", [True, False])
def test_a_first_ctrl_c_says_what_it_awaits_and_a_second_ends_the_run(folder: Path, has_begun: bool) -> None:
    """A run that has no folder yet is not said to resume."""
    process = Started(LONG_STEP, folder if has_begun else folder.with_name("none"), is_deaf=False)
    process.send(signal.SIGINT)
    process.wait_for("Ctrl-C again ends the run at once\n")
    process.send(signal.SIGINT)
    status, output, errors = process.ending()
    assert (status, output.startswith(f"ready\nstopped\n{signals.STOPPING}\n")) == (130, True)
    assert errors == ENDED_AT_ONCE + f"; resume with: grpo-ray resume {folder}" * has_begun + "\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "sign"),
    [([], "hangs"), (["recovery.stall_timeout_s=2", "checkpoint.every_num_steps=2"], "nothing has moved")],
    ids=["deadline", "stall"],
)
@pytest.mark.kept("deadline")
def test_a_driver_ends_in_time_although_a_write_hangs(
    folder: Path, tiny_model: TinyModel, overrides: list[str], sign: str
) -> None:
    """A file system that hangs stops neither the deadline of a SIGTERM nor the watch for stalls."""
    model = f"model={{path: {tiny_model()}, dtype: float32}}"
    more = ["algorithm.num_steps=1000", "run.on_preemption_s=1", model, *overrides]
    process = Started(ON_A_HUNG_DISK, folder.with_name("none"), sign, overrides=more)
    began = time.monotonic()
    process.send(signal.SIGTERM)
    status, output, errors = process.ending()
    assert status == 130, output + errors
    reasons = ("no checkpoint could be written in 1 s", "everything waits for the buffer", "in a restore")
    assert any(reason in output for reason in reasons)
    assert time.monotonic() - began < 500  # the write hangs for 1000 s
