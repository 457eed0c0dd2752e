"""Single key presses from a terminal that is being drawn on."""

import contextlib
import os
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def keys() -> Iterator[Callable[[float], str]]:
    """Provide `wait(seconds)`, which returns the key that was pressed meanwhile, or "".

    The terminal's mode is restored at the end. If the input is not a terminal, no key is ever pressed.
    """
    source = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
    before = termios.tcgetattr(source) if source is not None else None

    def wait(seconds: float) -> str:
        ready, _, _ = select.select([] if source is None else [source], [], [], seconds)
        return os.read(ready[0], 1).decode(errors="replace") if ready else ""

    try:
        if source is not None:
            tty.setcbreak(source, termios.TCSADRAIN)  # keeps the keys typed before
        yield wait
    finally:
        if source is not None and before is not None:
            termios.tcsetattr(source, termios.TCSADRAIN, before)
