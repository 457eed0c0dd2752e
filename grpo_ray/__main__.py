"""The command `grpo-ray`, also as `python -m grpo_ray`."""

import io
import os
import signal
import sys


def main() -> int:
    """Load the commands and run one; return the exit status."""
    while (stream := os.open(os.devnull, os.O_RDWR)) <= 2:  # it was closed, and would be another file's number
        os.set_inheritable(stream, True)
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is there to end, and a traceback would not help
    if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack a chart's blocks
        sys.stdout.reconfigure(errors="replace")
    from grpo_ray.tools import cli

    signal.signal(signal.SIGINT, handler)
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
