"""`grpo-ray submit`: check a job here, submit it, and follow it; or follow or stop one that was submitted."""

import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from grpo_ray.config.loading import load_config
from grpo_ray.errors import INTERRUPTED, RunError, shown_plainly
from grpo_ray.records.visible_text import visible
from grpo_ray.tools.submit.command import SubmitOptions
from grpo_ray.tools.submit.job_client import JobClient, check_token, job_address
from grpo_ray.tools.submit.submission import (
    Submission,
    SubmissionContext,
    check_upload,
    missing_here,
    resumption_job,
    training_job,
)


def submit(options: SubmitOptions) -> int:
    """Run the command; return the exit status.

    Raises:
        ConfigError, RunError: an option, the configuration, the files, or the cluster.
    """
    python = options.python or os.environ.get("GRPO_RAY_PYTHON")
    context = SubmissionContext(job_address(options.address), Path.cwd(), python, options.env)
    known = options.follow or options.stop
    if known and options.config is not None:
        raise RunError(f"--follow and --stop take a job's id and nothing else; leave out {options.config}")
    job = None if known else _checked_job(options, context)
    check_token(context)
    if job is not None:
        check_upload(job)
    client = JobClient(context.address)
    if options.stop:
        words = "no longer waiting; a job that was asked to stop does so by itself"
        return _unless_interrupted(client.stop, options.stop, words)
    job_id = options.follow
    if job is not None:
        job_id = client.submit(job)
        _print_submitted(job_id, job, options.address)
        if options.no_wait:
            return 0
    assert job_id is not None
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


def _print_submitted(job_id: str, job: Submission, address: str | None) -> None:
    at = f" --address {address}" if address else ""
    for warning in job.warnings:
        print(visible(f"! {warning}"))
    print(f"submitted  {job_id}")
    print(f"run        {job.metadata['run']}")
    print(f"watch      grpo-ray top {shlex.quote(job.metadata['run'])}")
    print(f"follow     grpo-ray submit --follow {job_id}{at}")
    print(f"stop       grpo-ray submit --stop {job_id}{at}", flush=True)
