"""Holding a process to some of the machine's cores."""

import contextlib
import os
from collections.abc import Sequence


def hold_to_cores(cores: Sequence[int] | None) -> None:
    """Every thread this process has (those to come inherit it); None leaves the choice to the system."""
    if cores is not None:
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setaffinity(int(thread), cores)
