"""The bytes that object stores have spilled: asked for in parallel, and never waited for."""

import threading
from typing import Any

from run_process import until

from grpo_ray.watch.spilling import ASK_EVERY_S, SpilledBytes


class Cluster:
    """Nodes that answer with a number, an error (None), or not before `release`."""

    def __init__(self, **answers: int | None) -> None:
        self.answers, self.hanging = answers, threading.Event()
        self.asked: list[str] = []
        self.now = 100.0

    @property
    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": name} for name in list(self.answers)]

    def ask(self, node: Any) -> int:
        self.asked.append(node["NodeID"])
        answer = self.answers[node["NodeID"]]
        if answer is None:
            raise OSError("the node does not answer")
        if answer < 0:
            self.hanging.wait(30)
        return abs(answer)

    def spilled(self) -> SpilledBytes:
        return SpilledBytes(lambda: self.nodes, self.ask, lambda: self.now)

    def total_later(self, spilled: SpilledBytes) -> int:
        """Return the total when it is time to ask again."""
        self.now += ASK_EVERY_S
        return spilled.total()


def test_a_node_that_hangs_delays_neither_the_step_nor_the_other_nodes() -> None:
    cluster = Cluster(a=3, hangs=-1000, b=4, dead=None)
    spilled = cluster.spilled()
    spilled.total()  # at once, whatever has been answered
    until(lambda: spilled.total() == 7)

    def is_asked_again() -> bool:
        assert cluster.total_later(spilled) == 7
        return min(cluster.asked.count(name) for name in ("a", "b", "dead")) > 3

    until(is_asked_again)
    assert cluster.asked.count("hangs") == 1
    cluster.hanging.set()
    until(lambda: spilled.total() == 1007)


def test_nodes_are_asked_at_most_once_in_some_seconds() -> None:
    cluster = Cluster(a=3, b=4)
    spilled = cluster.spilled()
    spilled.total()
    until(lambda: spilled.total() == 7)
    for _ in range(100):  # steps
        cluster.now += ASK_EVERY_S / 101
        spilled.total()
    assert sorted(cluster.asked) == ["a", "b"]


def test_what_a_lost_node_has_spilled_still_counts() -> None:
    cluster = Cluster(a=3, b=4)
    spilled = cluster.spilled()
    spilled.total()
    until(lambda: spilled.total() == 7)
    del cluster.answers["b"]
    cluster.answers["a"] = 5
    until(lambda: cluster.total_later(spilled) == 9)


def test_an_answer_that_does_not_come_leaves_the_last_one() -> None:
    cluster = Cluster(a=3)
    spilled = cluster.spilled()
    spilled.total()
    until(lambda: spilled.total() == 3)
    cluster.answers["a"] = None
    until(lambda: cluster.total_later(spilled) == 3 and len(cluster.asked) > 2)
