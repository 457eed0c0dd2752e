"""The command `grpo-ray top`."""

import contextlib
from dataclasses import dataclass
from typing import Annotated

from grpo_ray.tools.arguments import Argument, Command, Flag, Option, above_zero


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


def _top(options: TopOptions) -> int:
    from grpo_ray.tools.top.watch_run import top

    with contextlib.suppress(KeyboardInterrupt):  # this command has no actors to shut down
        top(options)
    return 0


TOP = Command(
    "top", TopOptions, _top, "watch a run in the terminal",
    "Watch a run in the terminal: its actors, steps and bottleneck. q or Ctrl-C ends only the watching.",
    group="Look",
)  # fmt: skip
