"""`grpo-ray top RUN|JOB`: redraw a run's frame until the run has ended or the user quits."""

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.live import Live

from grpo_ray.errors import RunError
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.tools.look import TopOptions
from grpo_ray.tools.submit.submission import RUN_KEY, SubmissionContext
from grpo_ray.tools.top.frame import draw_frame, plain_text
from grpo_ray.tools.top.run_view import RunView, read_view
from grpo_ray.watch.console import VisibleConsole

JOB_EVERY_S = 5.0
JOB_ACTIVE = ("PENDING", "RUNNING")
JOB_ENDED = ("STOPPED", "SUCCEEDED", "FAILED")


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


class Jobs(Protocol):
    """The part of `job_client.JobClient` that is needed here."""

    def status(self, job_id: str) -> str: ...
    def metadata(self, job_id: str) -> dict[str, str]: ...


class Job:
    """A submitted job; `run` is its run's folder, which may not exist yet."""

    def __init__(self, name: str, run: Path, jobs: Jobs) -> None:
        self.name, self.run, self._jobs = name, run, jobs
        self._asked_at, self._status = float("-inf"), ""

    def status(self) -> str:
        """Return Ray's status, such as RUNNING, which is asked for at most every `JOB_EVERY_S`.

        A cluster that does not answer must not end the watch.
        """
        if time.monotonic() - self._asked_at >= JOB_EVERY_S:
            try:
                self._status = self._jobs.status(self.name)
            except RunError:
                self._status = "unknown: Ray does not answer"
            self._asked_at = time.monotonic()
        return self._status


def find_job(name: str, address: str | None) -> Job:
    """Find a job on the cluster at `address`; None: the one in RAY_ADDRESS, or the one on this machine.

    Raises:
        RunError: no cluster answers, it has no such job, or the job does not name its run's folder.
    """
    if "/" in name or name.startswith("."):
        raise RunError(f"{name}: no such folder; give a run's folder, or the name of a submitted job")
    from grpo_ray.tools.submit.job_client import JobClient, check_token, job_address

    try:
        where = SubmissionContext(job_address(address), Path.cwd())
        check_token(where)
        return job_of(JobClient(where.address), name)
    except RunError as error:
        raise RunError(
            f"{name} is not a folder here, and was not found among a cluster's jobs: {error}"
        ) from error


def job_of(jobs: Jobs, name: str) -> Job:
    """Return the job of that name.

    Raises:
        RunError: there is no such job, or it does not name its run's folder.
    """
    metadata = jobs.metadata(name)
    if RUN_KEY not in metadata:
        raise RunError(
            f"job {name} does not name its run's folder (`grpo-ray submit` would have); give the folder instead"
        )
    return Job(name, Path(metadata[RUN_KEY]), jobs)


def top(options: TopOptions, console: Console | None = None) -> None:
    """Show a run until it has ended, or until q or Ctrl-C, which do not stop the run.

    Raises:
        RunError: there is no such run or job, or its folder cannot be read here.
    """
    console = console or VisibleConsole()
    job = None if Path(options.target).is_dir() else find_job(options.target, options.address)
    run = RunDirectory(Path(options.target) if job is None else job.run)
    if options.once or not console.is_terminal:
        view, note = _read(run, job)
        console.print(plain_text(note or "") if view is None else draw_frame(view, console, note))
        return
    _follow(run, job, console, options.every_s)


def _read(run: RunDirectory, job: Job | None) -> tuple[RunView | None, str | None]:
    """Read the run, and write a line about its job; no view while the job has not made the folder.

    Raises:
        RunError: there is nothing to wait for.
    """
    if job is None:
        return read_view(run), None
    note = f"job {job.name}: {job.status()}"
    if run.config_path.exists():
        return read_view(run), note
    if job.status().startswith(JOB_ENDED):
        raise RunError(f"{note}; there is no run in its folder {run.path} on this machine")
    return None, f"{note}; there is no run in its folder {run.path} yet, or not on this machine"


def _is_over(view: RunView | None, job: Job | None) -> bool:
    """Return True if the run has ended; a job that resumes a run shows its earlier ending until it starts."""
    return view is not None and view.is_over and not (job is not None and job.status() in JOB_ACTIVE)


def _follow(run: RunDirectory, job: Job | None, console: Console, every_s: float) -> None:
    view, note = _read(run, job)  # before the screen is taken, so that an error stays visible
    screen = Live(console=console, screen=True, auto_refresh=False)
    with contextlib.suppress(KeyboardInterrupt), keys() as wait, screen as live:
        while not _is_over(view, job):
            live.update(
                plain_text(note or "") if view is None else draw_frame(view, console, note), refresh=True
            )
            if wait(every_s) == "q":
                break
            view, note = _read(run, job)
    if view is not None:
        console.print(draw_frame(view, console, note))
