"""`grpo-ray top RUN`: redraw a run's frame until the run has ended or the user quits."""

import contextlib
import os
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.live import Live

from grpo_ray.records.run_files import RunDirectory
from grpo_ray.tools.look import TopOptions
from grpo_ray.tools.top.frame import draw_frame
from grpo_ray.tools.top.run_view import read_view
from grpo_ray.watch.console import VisibleConsole


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


def top(options: TopOptions, console: Console | None = None) -> None:
    """Show a run until it has ended, or until q or Ctrl-C, which do not stop the run.

    Raises:
        RunError: there is no such run, or its folder cannot be read here.
    """
    console, run = console or VisibleConsole(), RunDirectory(options.run)
    if options.once or not console.is_terminal:
        console.print(draw_frame(read_view(run), console))
        return
    _follow(run, console, options.every_s)


def _follow(run: RunDirectory, console: Console, every_s: float) -> None:
    view = read_view(run)  # before the screen is taken, so that an error stays visible
    screen = Live(console=console, screen=True, auto_refresh=False)
    with contextlib.suppress(KeyboardInterrupt), keys() as wait, screen as live:
        while not view.is_over:
            live.update(draw_frame(view, console), refresh=True)
            if wait(every_s) == "q":
                break
            view = read_view(run)
    console.print(draw_frame(view, console))
