"""The options of `grpo-ray top`."""

from dataclasses import dataclass
from typing import Annotated

from grpo_ray.tools.arguments import Argument, Flag, Option, above_zero


@dataclass(frozen=True)
class TopOptions:
    target: Annotated[str, Argument("RUN|JOB", "a run's directory, or the name of a submitted job")]
    address: Annotated[
        str | None,
        Option("URL", "dashboard of the job's cluster (default: RAY_ADDRESS, or the cluster on this machine)"),
    ] = None
    once: Annotated[bool, Flag("print one frame and exit, as without a terminal")] = False
    every_s: Annotated[
        float, Option("SECONDS", "time between frames (default: %(default)g)", name="--every", type=above_zero)
    ] = 1.0
