"""Run `python -m examples.course playground ...` or `data keywords ...`."""

import sys
from collections.abc import Sequence

from examples.course.keyword_data.arguments import DATA
from examples.course.playground.arguments import PLAYGROUND
from grpo_ray.tools.cli import main

COMMANDS = (DATA, PLAYGROUND)
PROGRAM = "python -m examples.course"


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status."""
    return main(arguments, COMMANDS, PROGRAM)


if __name__ == "__main__":
    sys.exit(run())
