"""The arguments of `grpo-ray top`."""

import argparse
import contextlib

from grpo_ray.tools.arguments import above_zero


def add_top(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="RUN|JOB", help="a run's folder, or the name of a submitted job")
    parser.add_argument("--once", action="store_true", help="print one frame and exit, as without a terminal")
    parser.add_argument(
        "--every",
        type=above_zero,
        default=1.0,
        metavar="SECONDS",
        help="time between frames (default: %(default)g)",
    )
    parser.add_argument(
        "--address",
        metavar="URL",
        help="dashboard of the job's cluster (default: $RAY_ADDRESS, or the cluster on this machine)",
    )
    parser.set_defaults(command=_top)


def _top(options: argparse.Namespace) -> int:
    from grpo_ray.tools.top.watch_run import TopOptions, top

    with contextlib.suppress(KeyboardInterrupt):  # this command has no actors to shut down
        top(TopOptions(options.target, options.address, options.once, options.every))
    return 0
