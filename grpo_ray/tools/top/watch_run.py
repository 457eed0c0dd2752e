"""`grpo-ray top RUN|JOB`: draw a run's frame again and again until it has ended or the user goes."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from grpo_ray.errors import RunError
from grpo_ray.telemetry.run_files import RunDirectory
from grpo_ray.tools.top.arguments import TopOptions
from grpo_ray.tools.top.frame import frame
from grpo_ray.tools.top.job import Job, find_job
from grpo_ray.tools.top.keys import keys
from grpo_ray.tools.top.run_view import RunView, look

JOB_EVERY_S = 5.0
JOB_GOING_ON = ("PENDING", "RUNNING")
JOB_ENDED = ("STOPPED", "SUCCEEDED", "FAILED")


def top(options: TopOptions, console: Console | None = None) -> None:
    """Show a run until it has ended, or until q or Ctrl-C; the run goes on.

    Raises:
        RunError: there is no such run or job, or its folder cannot be read here.
    """
    console = console or Console(highlight=False)
    job = None if Path(options.target).is_dir() else _find(options)
    run = RunDirectory(Path(options.target) if job is None else job.run)
    job_status = _Every(JOB_EVERY_S, job.status) if job is not None else None
    if options.once or not console.is_terminal:
        view, note = _look(run, job, job_status)
        console.print(Text(note or "") if view is None else frame(view, console, note))
        return
    _follow(run, job, job_status, console, options.every_s)


def _find(options: TopOptions) -> Job:
    if "/" in options.target or options.target.startswith("."):
        raise RunError(f"{options.target}: no such folder; give a run's folder, or the name of a submitted job")
    return find_job(options.target, options.address)


class _Every:
    """Asks at most once in so many seconds, and meanwhile says what it heard last."""

    def __init__(self, seconds: float, ask: Callable[[], str]) -> None:
        self._seconds, self._ask = seconds, ask
        self._asked_at, self._answer = float("-inf"), ""

    def __call__(self) -> str:
        if time.monotonic() - self._asked_at >= self._seconds:
            self._answer, self._asked_at = self._ask(), time.monotonic()
        return self._answer


def _look(run: RunDirectory, job: Job | None, status: _Every | None) -> tuple[RunView | None, str | None]:
    """The run, and what to say of its job; no run while its job has not made the folder.

    Raises:
        RunError: there is nothing to wait for.
    """
    if job is None or status is None:
        return look(run), None
    note = f"job {job.name}: {status()}"
    if run.config_path.exists():
        return look(run), note
    if status().startswith(JOB_ENDED):
        raise RunError(f"{note}; its run's folder, {run.path}, holds no run that can be read here")
    return None, f"{note}; its run's folder, {run.path}, holds no run: not yet made, or not on this machine"


def _is_over(view: RunView | None, status: _Every | None) -> bool:
    """A job that goes on with a run finds how it ended before; only the job's start takes that away."""
    is_job_going_on = status is not None and status() in JOB_GOING_ON
    return view is not None and view.is_over and not is_job_going_on


def _follow(
    run: RunDirectory, job: Job | None, status: _Every | None, console: Console, every_s: float
) -> None:
    view, note = _look(run, job, status)  # before the screen is taken: an error is then seen
    screen = Live(console=console, screen=True, auto_refresh=False)
    with contextlib.suppress(KeyboardInterrupt), keys() as wait, screen as live:
        while not _is_over(view, status):
            live.update(Text(note or "") if view is None else frame(view, console, note), refresh=True)
            if wait(every_s) == "q":
                break
            view, note = _look(run, job, status)
    if view is not None:
        console.print(frame(view, console, note))
