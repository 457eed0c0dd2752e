"""The command `grpo-ray top`."""

import contextlib

from grpo_ray.tools.arguments import Command
from grpo_ray.tools.top.options import TopOptions


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
