"""`grpo-ray submit`: check a job here, submit it, and follow it; or follow or stop one that was submitted."""

import asyncio
import contextlib
import logging
import os
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from grpo_ray.config.loading import load_config
from grpo_ray.config.secrets import RAY_TOKEN
from grpo_ray.errors import INTERRUPTED, RunError, ray_needed, shown_plainly
from grpo_ray.records.visible_text import visible
from grpo_ray.tools.submit.command import SubmitOptions
from grpo_ray.tools.submit.submission import (
    RUN_KEY,
    Submission,
    SubmissionContext,
    check_upload,
    missing_here,
    resumption_job,
    training_job,
)

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient
DEFAULT_ADDRESS = "http://127.0.0.1:8265"
STARTING_S = 60.0  # a head node answers some seconds before it accepts jobs
POLL_S = 0.5
ANSWER_S = 30.0  # for the first request; Ray's client itself waits for ever
NO_AGENT = (
    "the head node accepts no jobs, because its agent is not running; if another Ray on that machine holds the "
    "agent's port, start the head with --dashboard-agent-listen-port=0"
)


def submit(options: SubmitOptions) -> int:
    """Run the command; return the exit status.

    Raises:
        ConfigError, RunError: an option, the configuration, the files, or the cluster.
    """
    python = options.python or os.environ.get("GRPO_RAY_PYTHON")
    context = SubmissionContext(job_address(options.address), Path.cwd(), python, options.env)
    known = options.follow or options.stop
    without_use = {"--no-wait": options.no_wait, "--env": options.env, "--python": options.python}
    extra = [options.config, *(name for name, given in without_use.items() if given)]
    if known and (extra := [word for word in extra if word]):
        raise RunError(f"--follow and --stop take a job's id and nothing else; leave out {' '.join(extra)}")
    job = None if known else _checked_job(options, context)
    check_token(context)
    if job is not None:
        check_upload(job)
    client = JobClient(context.address)
    if options.stop:
        words = "no longer waiting; a job that was asked to stop does so by itself"
        return _unless_interrupted(client.stop, options.stop, words)
    job_id = options.follow or new_job_id()
    if job is not None:
        words = f"it may have been submitted; see with: {client.command('--follow', job_id)}"
        if status := _unless_interrupted(partial(client.submit, job), job_id, words):
            return status
        _print_submitted(job_id, job, client)
        if options.no_wait:
            return 0
    return _unless_interrupted(client.follow, job_id, "no longer following; the job keeps running")


def _checked_job(options: SubmitOptions, context: SubmissionContext) -> Submission:
    """Return the job after checking its configuration and files here, before it waits in a queue."""
    if options.resume is not None:  # a word in CONFIG's place is then a change
        overrides = [options.config, *options.overrides] if options.config else options.overrides
        return resumption_job(options.resume, overrides, context)
    if options.config is None:
        raise RunError("submit takes CONFIG, --resume RUN, --follow JOB or --stop JOB")
    job = training_job(options.config, options.overrides, context)
    config = load_config(options.config, options.overrides)
    if missing := missing_here(config, context):
        warning = f"{missing[0]} is not on this machine, so data and model are checked on the cluster"
        return replace(job, warnings=(*job.warnings, warning))
    from grpo_ray.run.preparation import check_files  # here, because it imports torch

    with shown_plainly():
        check_files(config)
    return job


def _unless_interrupted(call: Callable[[str], bool], job_id: str, words: str) -> int:
    """Return the exit status of the call; Ctrl-C ends the waiting alone, which `words` say."""
    try:
        return 0 if call(job_id) else 1
    except KeyboardInterrupt:
        print(f"\n{words}", file=sys.stderr)
        return INTERRUPTED


def new_job_id() -> str:
    return f"raysubmit_{secrets.token_hex(8)}"


def _print_submitted(job_id: str, job: Submission, client: "JobClient") -> None:
    for warning in job.warnings:
        print(visible(f"! {warning}"))
    print(f"submitted  {job_id}")
    print(f"run        {job.metadata['run']}")
    print(f"watch      grpo-ray top {shlex.quote(job.metadata['run'])}")
    print(f"follow     {client.command('--follow', job_id)}")
    print(f"stop       {client.command('--stop', job_id)}", flush=True)


def job_address(given: str | None) -> str:
    """Return the dashboard that jobs go to: the given one, RAY_ADDRESS, or that of a head on this machine.

    Raises:
        RunError: the address is not a dashboard's.
    """
    address = given or os.environ.get("RAY_ADDRESS") or DEFAULT_ADDRESS
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        source = "--address" if given else "RAY_ADDRESS"
        raise RunError(
            f"{source} is {address}: jobs go to the dashboard of a cluster's head node; "
            "give its address, such as http://HOST:8265"
        )
    return address.rstrip("/")


def check_token(context: SubmissionContext) -> None:
    """Use the cluster's token if there is one here; call before Ray is imported, which reads the mode once.

    Raises:
        RunError: the cluster is another machine, there is no token, and RAY_AUTH_MODE is not `disabled`.
    """
    file = Path(os.environ.get(RAY_TOKEN[1]) or Path.home() / ".ray" / "auth_token")
    has_token = bool(os.environ.get(RAY_TOKEN[0])) or (file.is_file() and file.stat().st_size > 0)
    if has_token:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    if not (context.is_here or has_token or os.environ.get("RAY_AUTH_MODE") == "disabled"):
        raise RunError(
            f"no token for {context.address}; set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's, or "
            "RAY_AUTH_MODE=disabled if it has none and anyone with access may run anything on it"
        )


class JobClient:
    """The jobs of one cluster."""

    def __init__(self, address: str) -> None:
        """Connect to the cluster.

        Raises:
            RunError: nothing answers at the address, or the cluster refuses the token.
        """
        os.environ["RAY_API_SERVER_ADDRESS"] = address  # Ray prefers this to its argument
        self.address = address
        with _explained(address):
            self._client = _connect(address)

    def command(self, option: str, value: str) -> str:
        """Return a command for the user to type."""
        at = "" if self.address == DEFAULT_ADDRESS else f" --address {self.address}"
        return f"grpo-ray submit {option} {shlex.quote(value)}{at}"

    def submit(self, job: Submission, job_id: str) -> bool:
        """Upload the working directory and start the job; return True."""
        deadline = time.monotonic() + STARTING_S
        with _explained(self.address):
            while True:
                try:
                    self._client.submit_job(
                        entrypoint=job.entrypoint,
                        submission_id=job_id,
                        runtime_env=dict(job.runtime_env),
                        metadata=dict(job.metadata),
                    )
                    return True
                except RuntimeError as error:
                    if "No available agent" not in str(error):
                        raise
                    if time.monotonic() > deadline:
                        raise RuntimeError(NO_AGENT) from error
                    time.sleep(POLL_S)

    def follow(self, job_id: str) -> bool:
        """Print the job's output until it ends; return True if it succeeded."""
        again = self.command("--follow", job_id)
        run = self._run_of(job_id)  # raises if there is no such job, which the output does not
        try:
            with _explained(self.address):
                with contextlib.suppress(RuntimeError):  # the connection broke
                    asyncio.run(self._print_output(job_id))
                if not self._client.get_job_status(job_id).is_terminal():
                    raise RuntimeError(f"the connection ended; the job keeps running; follow it again: {again}")
                return self._report_end(job_id)
        except UnreachableError:
            resume = f"; if its head node ended: {self.command('--resume', run)}" if run else ""
            text = f"{self.address} no longer answers; when it does, follow again: {again}{resume}"
            print(visible(text), file=sys.stderr)
            return False

    def stop(self, job_id: str) -> bool:
        """Ask the job to end and wait until it has; its run finishes the step and writes a checkpoint."""
        run = self._run_of(job_id)
        with _explained(self.address):
            if not self._client.stop_job(job_id):
                self._report_end(job_id)
                return True
            print(f"job {job_id} is stopping, with a checkpoint after its current step", flush=True)
            while not self._client.get_job_status(job_id).is_terminal():
                time.sleep(POLL_S)
            self._report_end(job_id)
            if run is not None:
                print(visible(f"resume it, if it had begun, with: {self.command('--resume', run)}"))
            return True

    def _run_of(self, job_id: str) -> str | None:
        with _explained(self.address):
            return (self._client.get_job_info(job_id).metadata or {}).get(RUN_KEY)

    async def _print_output(self, job_id: str) -> None:
        async for lines in self._client.tail_job_logs(job_id):
            print(visible(lines), end="", flush=True)

    def _report_end(self, job_id: str) -> bool:
        info: Any = self._client.get_job_info(job_id)
        why = ""
        if info.status == "FAILED":  # Ray appends the end of the output, which was already printed
            why = f": {(info.message or '').partition(', last available logs')[0]}"
        print(visible(f"job {job_id}: {info.status.lower()}{why}"))
        return bool(info.status == "SUCCEEDED")


class UnreachableError(RunError): ...


def _connect(address: str) -> "JobSubmissionClient":
    import requests
    from ray.job_submission import JobSubmissionClient

    requests.get(address, timeout=ANSWER_S)
    for handler in logging.getLogger("ray").handlers:  # otherwise Ray lists every file that it does not upload
        handler.setLevel(logging.ERROR)
    return JobSubmissionClient(address)


@contextlib.contextmanager
def _explained(address: str) -> Iterator[None]:
    """Turn the errors of Ray's client into a RunError."""
    with ray_needed():
        from ray.exceptions import AuthenticationError
    import aiohttp
    import requests

    try:
        yield
    except (ConnectionError, requests.ConnectionError, requests.Timeout, aiohttp.ClientError) as error:
        proxy = " through a proxy (NO_PROXY)" * isinstance(error, requests.exceptions.ProxyError)
        raise UnreachableError(
            f"no Ray dashboard answers at {address}{proxy}; start a head node with launch/start_head.sh, or "
            "give another with --address or RAY_ADDRESS"
        ) from error
    except AuthenticationError as error:
        raise RunError(
            f"{address} refuses this token; RAY_AUTH_TOKEN, or the file RAY_AUTH_TOKEN_PATH "
            "(~/.ray/auth_token), must hold the cluster's"
        ) from error
    except (RuntimeError, ValueError) as error:  # its HTTP errors; a folder that is too large to upload
        raise RunError(f"{address}: {error}") from error
