"""Single keys from a terminal, while something else is drawn on it."""

import contextlib
import os
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def keys() -> Iterator[Callable[[float], str]]:
    """Gives `wait(seconds)`: the key that was pressed meanwhile, or nothing after so long.

    The terminal is as it was afterwards. Where the input is no terminal, nothing is ever pressed.
    """
    source = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
    before = termios.tcgetattr(source) if source is not None else None

    def wait(seconds: float) -> str:
        ready, _, _ = select.select([] if source is None else [source], [], [], seconds)
        return os.read(ready[0], 1).decode(errors="replace") if ready else ""

    try:
        if source is not None:
            tty.setcbreak(source, termios.TCSADRAIN)  # what was typed before counts too
        yield wait
    finally:
        if source is not None and before is not None:
            termios.tcsetattr(source, termios.TCSADRAIN, before)
