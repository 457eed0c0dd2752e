"""SIGINT and SIGTERM: the first ends the run with a checkpoint, the second ends the process."""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Iterator

from grpo_ray.errors import INTERRUPTED
from grpo_ray.run.controller import RECOVERABLE, Controller
from grpo_ray.run.restores import how_to_resume
from grpo_ray.telemetry.run_files import RunDirectory

CLEAN_UP_S = 60.0  # after `run.on_preemption_s`


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM, after every actor and process has ended; the message says how to resume."""


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Turn SIGTERM into Ctrl-C, so that both clean up in the same way (Ray's own handler exits at once)."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def run_until_signal(
    controller: Controller, on_preemption_s: float, run: RunDirectory, ends_process: bool = False
) -> None:
    """Run the controller until it ends or a signal stops it.

    The first SIGINT or SIGTERM stops it after the current step, with a checkpoint; a second ends the process at
    once. `on_preemption_s` after a SIGTERM, the step is abandoned.

    Args:
        ends_process: end the process `CLEAN_UP_S` after that even if its clean-up hangs, as on a file system
            that does not answer; the reaper then ends the actors.
    """

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()

        def stop(number: int) -> None:
            for other in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(other)
                signal.signal(other, signal.SIG_DFL)
            controller.stop(is_preempted=number == signal.SIGTERM)
            if number == signal.SIGTERM:
                loop.call_later(on_preemption_s, task.cancel)
                if ends_process:
                    _end_process_after(on_preemption_s + CLEAN_UP_S)

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        await controller.run()

    before = signal.getsignal(signal.SIGTERM)
    try:
        asyncio.run(main())
    except asyncio.CancelledError:
        text = f"no checkpoint could be written in {on_preemption_s:g} s (run.on_preemption_s)"
        raise Interrupted(f"{text}; {how_to_resume(run)}") from None
    except RECOVERABLE as error:
        if controller.was_stopped:  # a restore would only be stopped as well
            raise Interrupted(f"{error}; {how_to_resume(run)}") from error
        raise
    finally:
        signal.signal(signal.SIGTERM, before)  # asyncio leaves the default, which would skip the clean-up
    if controller.was_stopped:
        raise Interrupted(how_to_resume(run))


def _end_process_after(seconds: float) -> None:
    timer = threading.Timer(seconds, os._exit, (INTERRUPTED,))
    timer.daemon = True
    timer.start()
