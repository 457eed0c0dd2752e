"""The command `grpo-ray submit`."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from grpo_ray.tools.arguments import EXCLUSIVE, Argument, Command, Flag, Option, Overrides

Instead = partial(Option, group=EXCLUSIVE)


@dataclass(frozen=True)
class SubmitOptions:
    config: Annotated[str | None, Argument("CONFIG", "a YAML file in the working directory")] = None
    overrides: Overrides = ()
    resume: Annotated[str | None, Instead("RUN", "resume the run in this directory, as a job")] = None
    follow: Annotated[str | None, Instead("JOB", "print a job's output until it ends")] = None
    stop: Annotated[str | None, Instead("JOB", "end a job with a checkpoint")] = None
    address: Annotated[
        str | None, Option("URL", "the cluster's dashboard (default: RAY_ADDRESS, or http://127.0.0.1:8265)")
    ] = None
    no_wait: Annotated[bool, Flag("submit without following the output")] = False
    env: Annotated[tuple[str, ...], Option("NAME", "a variable to pass on to the job; repeatable")] = ()
    python: Annotated[
        str | None,
        Option(
            "PATH",
            "a Python on the cluster that has grpo_ray (default: GRPO_RAY_PYTHON, or on this machine the "
            "current one, else `python`)",
        ),
    ] = None


def _submit(options: SubmitOptions) -> int:
    from grpo_ray.tools.submit.submit import submit

    return submit(options)


SUBMIT = Command(
    "submit", SubmitOptions, _submit, "run a job on a Ray cluster",
    "Submit a training run to a Ray cluster, follow it, or stop it; see docs/cluster.md.",
)  # fmt: skip
