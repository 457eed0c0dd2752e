"""The bytes that object stores have spilled: asked for in the background, and never waited for."""

import threading
from typing import Any

import pytest
from run_process import until

from grpo_ray.watch.spilling import SpilledBytes

Node = dict[str, Any]


def test_nodes_are_asked_in_the_background_and_their_last_answers_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("grpo_ray.watch.spilling.ASK_EVERY_S", 0.0)
    answers: dict[str, int | None] = {"a": 3, "dead": None, "b": 4}
    may_answer, asked = threading.Event(), list[str]()

    def ask(node: Node) -> int:
        may_answer.wait(60)
        asked.append(node["NodeID"])
        if (answer := answers[node["NodeID"]]) is None:
            raise OSError("the node does not answer")
        return answer

    spilled = SpilledBytes(lambda: [{"NodeID": name} for name in list(answers)], ask)
    assert spilled.total() == 0  # at once, although a node hangs
    may_answer.set()
    until(lambda: spilled.total() == 7)
    del answers["b"]  # the node was lost
    answers["a"] = 5
    until(lambda: spilled.total() == 9)
    answers["a"] = None
    num_asked = len(asked)
    until(lambda: spilled.total() == 9 and len(asked) > num_asked + 4)


def test_nodes_are_not_asked_in_every_step() -> None:
    asked: list[Node] = []
    spilled = SpilledBytes(lambda: [{"NodeID": "a"}], lambda node: asked.append(node) or 3)  # type: ignore[func-returns-value]
    until(lambda: spilled.total() == 3)
    for _ in range(100):
        spilled.total()
    assert len(asked) == 1
