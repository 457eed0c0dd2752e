"""Resident memory of a process."""

import contextlib

import psutil


def resident_bytes(with_children: bool = True) -> int:
    """Return the resident memory of this process and its children; shared pages count for each process.

    Finding the children costs milliseconds, because psutil looks at every process of the machine.
    """
    own = psutil.Process()
    total = int(own.memory_info().rss)
    for child in own.children(recursive=True) if with_children else ():
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
            total += int(child.memory_info().rss)
    return total
