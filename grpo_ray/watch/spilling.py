"""The bytes that a cluster's object stores have spilled to disk, asked for in the background."""

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from grpo_ray.watch.background import BackgroundThread

ASK_EVERY_S = 10.0

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
