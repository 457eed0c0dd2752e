"""The resident memory of a process, and the bytes that object stores have spilled to disk."""

import contextlib
import gc
import math
import os
import resource
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import psutil

from grpo_ray.watch.background import BackgroundThread
from grpo_ray.watch.clock import is_simulated

ASK_EVERY_S = 10.0
SEARCH_EVERY_S = 30.0


class ProcessFamily:
    """This process and its children.

    psutil finds children by looking at every process of the machine, which takes milliseconds: on a node with
    many actors, each would look at all the others in every step. So the children are found at times, and only
    their memory is read in between.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._own, self._clock = psutil.Process(), clock
        self.pid = os.getpid()
        # Stays open: an EnvironmentWorker may open nothing of its own in /proc.
        self._statm = os.open("/proc/self/statm", os.O_RDONLY)
        weakref.finalize(self, os.close, self._statm)
        self._children: list[psutil.Process] = []
        self._searched_at = -math.inf

    def resident_bytes(self, with_children: bool) -> int:
        """Return the memory of this process, and of the children that it had at the last search."""
        total = int(os.pread(self._statm, 64, 0).split()[1]) * resource.getpagesize()
        if with_children and self._clock() - self._searched_at >= SEARCH_EVERY_S:
            self._children, self._searched_at = self._own.children(recursive=True), self._clock()
        for child in self._children if with_children else ():
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
                total += int(child.memory_info().rss)
        return total


_family = ProcessFamily()


def resident_bytes(with_children: bool = True) -> int:
    """Return the resident memory of this process and its children; shared pages count for each process.

    A child younger than `SEARCH_EVERY_S` may be missing. Simulated actors have no memory.
    """
    if is_simulated():
        return 0
    global _family
    if _family.pid != os.getpid():  # this process was forked
        _family = ProcessFamily()
    return _family.resident_bytes(with_children)


@contextlib.contextmanager
def imports_left_alone() -> Iterator[None]:
    """Leave the objects that exist now out of garbage collections.

    Imported libraries are some 450,000 of them. A full collection stops the event loop for 0.3 s.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


Node = Mapping[str, Any]  # an entry of `ray.nodes()`


class SpilledBytes:
    """The newest answer of each node; one that hangs delays the others' next answers, and nothing else."""

    def __init__(self, nodes: Callable[[], Iterable[Node]], ask: Callable[[Node], int]) -> None:
        self._nodes, self._ask = nodes, ask
        self._answers: dict[str, int] = {}  # by node; that of a node that was lost is kept
        self._thread = BackgroundThread("spilled-bytes")

    def total(self) -> int:
        """Return the sum of the newest answers at once; have the nodes asked again if that is due."""
        if not self._thread.busy_s and not self._thread.num_waiting:
            self._thread.submit("the bytes that nodes have spilled", self._ask_all)
        return sum(list(self._answers.values()))

    def _ask_all(self) -> None:
        for node in self._nodes():
            with contextlib.suppress(Exception):  # without an answer the last one stands
                self._answers[node["NodeID"]] = self._ask(node)
        time.sleep(ASK_EVERY_S)
