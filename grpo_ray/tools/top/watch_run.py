"""`grpo-ray top RUN|JOB`: redraw a run's frame until the run has ended or the user quits."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.live import Live

from grpo_ray.errors import RunError
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.tools.top.command import TopOptions
from grpo_ray.tools.top.frame import draw_frame, plain_text
from grpo_ray.tools.top.job import Job, find_job
from grpo_ray.tools.top.keys import keys
from grpo_ray.tools.top.run_view import RunView, read_view
from grpo_ray.watch.console import VisibleConsole

JOB_EVERY_S = 5.0
JOB_ACTIVE = ("PENDING", "RUNNING")
JOB_ENDED = ("STOPPED", "SUCCEEDED", "FAILED")


def top(options: TopOptions, console: Console | None = None) -> None:
    """Show a run until it has ended, or until q or Ctrl-C, which do not stop the run.

    Raises:
        RunError: there is no such run or job, or its folder cannot be read here.
    """
    console = console or VisibleConsole()
    job = None if Path(options.target).is_dir() else _find(options)
    run = RunDirectory(Path(options.target) if job is None else job.run)
    job_status = _RateLimited(JOB_EVERY_S, job.status) if job is not None else None
    if options.once or not console.is_terminal:
        view, note = _read(run, job, job_status)
        console.print(plain_text(note or "") if view is None else draw_frame(view, console, note))
        return
    _follow(run, job, job_status, console, options.every_s)


def _find(options: TopOptions) -> Job:
    if "/" in options.target or options.target.startswith("."):
        raise RunError(f"{options.target}: no such folder; give a run's folder, or the name of a submitted job")
    return find_job(options.target, options.address)


class _RateLimited:
    """A function that is called at most once in `seconds`; in between, its last result is returned."""

    def __init__(self, seconds: float, ask: Callable[[], str]) -> None:
        self._seconds, self._ask = seconds, ask
        self._asked_at, self._answer = float("-inf"), ""

    def __call__(self) -> str:
        if time.monotonic() - self._asked_at >= self._seconds:
            self._answer, self._asked_at = self._ask(), time.monotonic()
        return self._answer


def _read(run: RunDirectory, job: Job | None, status: _RateLimited | None) -> tuple[RunView | None, str | None]:
    """Read the run, and write a line about its job; no view while the job has not made the folder.

    Raises:
        RunError: there is nothing to wait for.
    """
    if job is None or status is None:
        return read_view(run), None
    note = f"job {job.name}: {status()}"
    if run.config_path.exists():
        return read_view(run), note
    if status().startswith(JOB_ENDED):
        raise RunError(f"{note}; there is no run in its folder {run.path} on this machine")
    return None, f"{note}; there is no run in its folder {run.path} yet, or not on this machine"


def _is_over(view: RunView | None, status: _RateLimited | None) -> bool:
    """Return True if the run has ended; a job that resumes a run shows its earlier ending until it starts."""
    is_job_active = status is not None and status() in JOB_ACTIVE
    return view is not None and view.is_over and not is_job_active


def _follow(
    run: RunDirectory, job: Job | None, status: _RateLimited | None, console: Console, every_s: float
) -> None:
    view, note = _read(run, job, status)  # before the screen is taken, so that an error stays visible
    screen = Live(console=console, screen=True, auto_refresh=False)
    with contextlib.suppress(KeyboardInterrupt), keys() as wait, screen as live:
        while not _is_over(view, status):
            live.update(
                plain_text(note or "") if view is None else draw_frame(view, console, note), refresh=True
            )
            if wait(every_s) == "q":
                break
            view, note = _read(run, job, status)
    if view is not None:
        console.print(draw_frame(view, console, note))
