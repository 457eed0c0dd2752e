"""The arguments of `grpo-ray submit`."""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_ray.errors import INTERRUPTED, RunError, shown_plainly
from grpo_ray.tools.arguments import add_overrides

if TYPE_CHECKING:
    from grpo_ray.tools.submit.submission import Circumstances, Submission


def add_submit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="a YAML file in the present folder")
    add_overrides(parser)
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--resume", metavar="RUN", help="go on with the run in this folder, in a job")
    instead.add_argument("--follow", metavar="JOB", help="print a job's output until it ends")
    instead.add_argument("--stop", metavar="JOB", help="end a job, with a checkpoint")
    parser.add_argument(
        "--address",
        metavar="URL",
        help="the cluster's dashboard (default: RAY_ADDRESS, or http://127.0.0.1:8265)",
    )
    parser.add_argument("--no-wait", action="store_true", help="submit, and do not follow the output")
    parser.add_argument(
        "--env", metavar="NAME", action="append", default=[], help="a variable of this shell that the job gets"
    )
    parser.add_argument(
        "--python",
        metavar="PATH",
        default=os.environ.get("GRPO_RAY_PYTHON"),
        help="a Python on the cluster that has grpo_ray (default: GRPO_RAY_PYTHON, this one if the cluster is "
        "this machine, else `python`)",
    )
    parser.set_defaults(command=_submit)


def _submit(options: argparse.Namespace) -> int:
    from grpo_ray.tools.submit.job_client import check_token, job_address
    from grpo_ray.tools.submit.submission import Circumstances, check_sent

    address = job_address(options.address)
    where = Circumstances(address, Path.cwd(), options.python, options.env)
    known = options.follow or options.stop
    if known:
        _refuse_config(options)
    job = None if known else _job(options, where)
    check_token(where)
    if job is not None:
        check_sent(job)
    from grpo_ray.tools.submit.job_client import JobClient

    client = JobClient(address)
    if options.stop:
        try:
            client.stop(options.stop)
        except KeyboardInterrupt:
            print("\nno longer waiting; a job that was asked to stop does so by itself", file=sys.stderr)
            return INTERRUPTED
        return 0
    if job is not None:
        job_id = client.submit(job)
        _print_submitted(job_id, job, options.address)
        if options.no_wait:
            return 0
    try:
        return 0 if client.follow(options.follow or job_id) else 1
    except KeyboardInterrupt:
        print("\nno longer following; the job goes on", file=sys.stderr)
        return INTERRUPTED


def _refuse_config(options: argparse.Namespace) -> None:
    if options.config is not None:
        raise RunError(f"--follow and --stop take a job's id and nothing else; leave out {options.config}")


def _job(options: argparse.Namespace, where: "Circumstances") -> "Submission":
    """The job, after making sure that it will not fail over a typing error: seconds here, not in a queue."""
    from grpo_ray.tools.submit.submission import files_only_there, resumption_job, training_job

    if options.resume is not None:  # what stands in CONFIG's place is a change
        overrides = [options.config, *options.overrides] if options.config else options.overrides
        return resumption_job(options.resume, overrides, where)
    if options.config is None:
        raise RunError("submit takes CONFIG, --resume RUN, --follow JOB or --stop JOB")
    job = training_job(options.config, options.overrides, where)
    from grpo_ray.config.loading import load_config
    from grpo_ray.run.preflight import check_files

    config = load_config(options.config, options.overrides)
    if there := files_only_there(config, where):
        warning = f"{there[0]} is not on this machine, so data and model are checked on the cluster"
        return replace(job, warnings=(*job.warnings, warning))
    with shown_plainly():
        check_files(config)
    return job


def _print_submitted(job_id: str, job: "Submission", address: str | None) -> None:
    there = f" --address {address}" if address else ""
    for warning in job.warnings:
        print(f"! {warning}")
    print(f"submitted  {job_id}")
    print(f"run        {job.metadata['run']}")
    print(f"watch      grpo-ray top {job_id}{there}")
    print(f"follow     grpo-ray submit --follow {job_id}{there}")
    print(f"stop       grpo-ray submit --stop {job_id}{there}", flush=True)
