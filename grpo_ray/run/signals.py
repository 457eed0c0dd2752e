"""SIGINT, SIGTERM and SIGHUP: the first ends the run with a checkpoint, the second ends the process at once.

Python runs a signal's handler in the main thread, between two steps of its own code. A thread sees the signals
that the main thread is too busy for: it is in native code, or its event loop is.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Collection, Iterator

from grpo_ray.core.controller import RECOVERABLE, Controller
from grpo_ray.errors import INTERRUPTED
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.records.visible_text import visible
from grpo_ray.run.restores import how_to_resume

CLEAN_UP_S = 60.0  # after `run.on_preemption_s`
ANSWER_S = 5.0  # for the main thread to take notice of the first signal
STOPPING = "waiting for the end of this step and its checkpoint; Ctrl-C again ends the run at once"
AGAIN = (signal.SIGINT, signal.SIGTERM)
SIGNALS = (*AGAIN, signal.SIGHUP)  # of which a closed terminal sends two

_noticed = threading.Event()  # by the main thread


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM, after every actor and process has ended; the message says how to resume `run`."""

    def __init__(self, text: str, run: RunDirectory | None = None) -> None:
        super().__init__(text)
        self.run = run


def is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def signals_answered(run: RunDirectory | None = None) -> Iterator[None]:
    """Raise KeyboardInterrupt for the first signal; end the process if that is not noticed, or a second comes.

    The reaper then ends the actors. Signals reach only a main thread; in another one nothing changes.

    Args:
        run: the last message says how to resume it.
    """
    if not is_main_thread():
        yield
        return
    before = {number: signal.signal(number, _interrupt) for number in _answered()}
    _noticed.clear()
    watched, ours = socket.socketpair()
    ours.setblocking(False)
    previous = signal.set_wakeup_fd(ours.fileno(), warn_on_full_buffer=False)
    watch = threading.Thread(target=_watch, args=(watched, run), daemon=True)
    watch.start()
    hook, sys.unraisablehook = sys.unraisablehook, _raise_again
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if run is None or str(interrupt) or not run.config_path.exists():
            raise
        raise type(interrupt)(how_to_resume(run)) from interrupt
    finally:
        sys.unraisablehook = hook
        signal.set_wakeup_fd(previous)
        for number, handler in before.items():
            signal.signal(number, handler)
        ours.close()
        watch.join()
        watched.close()


def _answered() -> tuple[signal.Signals, ...]:
    """Return SIGNALS; not that of a closed terminal under `nohup`, which ignores it."""
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return tuple(number for number in SIGNALS if number != signal.SIGHUP or not is_ignored)


def _interrupt(*_: object) -> None:
    _noticed.set()
    raise KeyboardInterrupt


def _raise_again(unraisable: "sys.UnraisableHookArgs") -> None:
    """Interrupt the main thread again: the first time it was in a `__del__`, out of which nothing is raised."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        arguments = ctypes.c_ulong(threading.get_ident()), ctypes.py_object(KeyboardInterrupt)
        threading.Timer(0.1, ctypes.pythonapi.PyThreadState_SetAsyncExc, arguments).start()  # once this is left
    else:
        sys.__unraisablehook__(unraisable)


def _watch(signals: socket.socket, run: RunDirectory | None) -> None:
    """Wait for a second signal, or for the main thread to miss the first, and end the process."""
    if not _next_signal(signals):
        return
    try:
        has_come = _next_signal(signals, ANSWER_S, AGAIN)
    except TimeoutError:
        if not _noticed.is_set():
            _end_process(f"ended at once, because it did not answer within {ANSWER_S:g} s", run)
        has_come = _next_signal(signals, None, AGAIN)
    if has_come:
        _end_process("ended at once, without waiting any longer", run)


def _next_signal(
    signals: socket.socket, limit_s: float | None = None, counted: Collection[int] = SIGNALS
) -> bool:
    """Wait for a signal; return False when the watch is over. Raises TimeoutError if none came."""
    signals.settimeout(limit_s)
    while number := signals.recv(1):
        if number[0] in counted:
            return True
    return False


def _end_process(what: str, run: RunDirectory | None) -> None:
    _end_process_after(1.0)  # the terminal or the disk may hang
    hint = f"; {how_to_resume(run)}" if run is not None and run.config_path.exists() else ""
    cursor = "\x1b[?25h" if os.isatty(2) else ""  # a progress bar hides it
    with contextlib.suppress(OSError):  # the terminal may be closed
        os.write(2, f"{cursor}\n{visible(what + hint)}\n".encode(errors="replace"))
    os._exit(INTERRUPTED)


@contextlib.contextmanager
def signals_handled(numbers: Collection[signal.Signals], handler: Callable[..., None]) -> Iterator[None]:
    """Have the handler answer the signals while the block lasts, if this is the main thread."""
    before = {number: signal.signal(number, handler) for number in numbers if is_main_thread()}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def sigterm_interrupts() -> contextlib.AbstractContextManager[None]:
    """Turn SIGTERM into Ctrl-C in the main thread, so that both clean up in the same way."""
    return signals_handled((signal.SIGTERM,), _interrupt)


@contextlib.contextmanager
def signals_noticed(stop: Callable[[int], object]) -> Iterator[Callable[[], None]]:
    """Have the running loop call `stop` with the number of each signal, instead of raising KeyboardInterrupt.

    Yield a function that does what a SIGINT does, which any thread may call.
    """
    loop = asyncio.get_running_loop()

    def notice(number: int = signal.SIGINT, _: object = None) -> None:
        _noticed.set()
        if not loop.is_closed():
            loop.call_soon_threadsafe(stop, number)

    with signals_handled(_answered(), notice):  # `loop.add_signal_handler` would take the watch's place
        yield notice


def run_until_signal(
    controller: Controller, on_preemption_s: float, run: RunDirectory, ends_process: bool = False,
    say: Callable[[str], None] = print, stoppable_by: Callable[[Callable[[], None]], None] | None = None,
) -> None:  # fmt: skip
    """Run the controller until it ends or a signal stops it.

    The first signal stops it after the current step, with a checkpoint. `on_preemption_s` after a SIGTERM the
    step is abandoned. With `ends_process` the process ends `CLEAN_UP_S` later even if its clean-up hangs, as on
    a file system that does not answer. A second signal is for `signals_answered`. `stoppable_by` is given a
    function that stops the controller as a SIGINT does, which any thread may call.
    """

    async def main() -> None:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None

        def stop(number: int) -> None:
            if not controller.was_stopped:
                loop.call_soon(threading.Thread(target=say, args=(STOPPING,), daemon=True).start)  # may hang
            controller.stop(is_preempted=number == signal.SIGTERM)
            if number == signal.SIGTERM:
                loop.call_later(on_preemption_s, task.cancel)
                if ends_process:
                    _end_process_after(on_preemption_s + CLEAN_UP_S)

        with signals_noticed(stop) as stop_as_ctrl_c:
            if stoppable_by is not None:
                stoppable_by(stop_as_ctrl_c)
            await controller.run()

    try:
        asyncio.run(main())
    except asyncio.CancelledError:
        text = f"no checkpoint could be written in {on_preemption_s:g} s (run.on_preemption_s)"
        raise Interrupted(f"{text}; {how_to_resume(run)}", run) from None
    except RECOVERABLE as error:
        if controller.was_stopped:  # a restore would only be stopped as well
            raise Interrupted(f"{error}; {how_to_resume(run)}", run) from error
        raise
    if controller.was_stopped:
        raise Interrupted(how_to_resume(run), run)


def _end_process_after(seconds: float) -> None:
    timer = threading.Timer(seconds, os._exit, (INTERRUPTED,))
    timer.daemon = True
    timer.start()
