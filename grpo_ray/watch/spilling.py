"""The bytes that a cluster's object stores have spilled to disk, asked for in the background."""

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from threading import Thread
from typing import Any

ASK_EVERY_S = 10.0

Node = Mapping[str, Any]  # an entry of `ray.nodes()`


class SpilledBytes:
    """The newest answer of each node. All are asked in parallel, and nothing waits for one that hangs."""

    def __init__(
        self, nodes: Callable[[], Iterable[Node]], ask: Callable[[Node], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._nodes, self._ask, self._clock = nodes, ask, clock
        self._answers: dict[str, int] = {}  # by node; that of a node that was lost is kept
        self._asked: set[str] = set()  # that have not answered yet
        self._next_at = -float("inf")

    def total(self) -> int:
        """Return the sum of the newest answers at once; have the nodes asked again if that is due."""
        if self._clock() >= self._next_at:
            self._next_at = self._clock() + ASK_EVERY_S
            self._in_background("all nodes", self._ask_all)
        return sum(list(self._answers.values()))

    def _ask_all(self) -> None:
        for node in self._nodes():
            self._in_background(node["NodeID"], partial(self._ask_one, node))

    def _ask_one(self, node: Node) -> None:
        self._answers[node["NodeID"]] = self._ask(node)

    def _in_background(self, name: str, work: Callable[[], None]) -> None:
        """Run the work in a thread of its own, unless the thread before it is still waiting."""
        if name in self._asked:
            return
        self._asked.add(name)
        Thread(target=self._run, args=(name, work), name=f"spilled-{name}", daemon=True).start()

    def _run(self, name: str, work: Callable[[], None]) -> None:
        try:
            with contextlib.suppress(Exception):  # without an answer the last one stands
                work()
        finally:
            self._asked.discard(name)
