"""The memory of a process and its children, what measuring it costs, and what object stores have spilled."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from run_process import until

from grpo_ray.watch.memory import SEARCH_EVERY_S, ProcessFamily, SpilledBytes, resident_bytes


@contextmanager
def child_of_64_mib() -> Iterator[None]:
    script = "block = bytearray(b'x') * (64 * 2**20); print(flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    child.stdout.readline()
    yield
    child.communicate("\n")


@pytest.mark.slow
def test_resident_memory_counts_children() -> None:
    """In a process of its own: that of the tests may have other children, such as the Ray that they share."""
    script = f"import sys; sys.path.append('..'); import {__name__}; {__name__}.check_with_children()"
    subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parent, check=True)


def check_with_children() -> None:
    status = Path("/proc/self/status").read_text()
    (own_kib,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    assert resident_bytes(with_children=False) == pytest.approx(own_kib * 1024, rel=0.05)
    with child_of_64_mib():
        family = ProcessFamily()
        assert family.resident_bytes(True) - family.resident_bytes(False) > 60 * 2**20
    assert family.resident_bytes(True) - family.resident_bytes(False) < 10 * 2**20  # it has ended


def test_children_are_searched_for_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """psutil looks at every process of the machine, and a step asks every actor."""
    searches, children, now = [], psutil.Process.children, 5.0

    def searched(process: psutil.Process, recursive: bool) -> Any:
        searches.append(now)
        return children(process, recursive=recursive)

    monkeypatch.setattr(psutil.Process, "children", searched)
    family = ProcessFamily(lambda: now)
    for _ in range(100):
        family.resident_bytes(with_children=True)
        now += SEARCH_EVERY_S / 60
    assert searches == [5.0, pytest.approx(5.0 + SEARCH_EVERY_S)]
    with child_of_64_mib():
        now += SEARCH_EVERY_S  # so a younger child counts as well
        assert family.resident_bytes(True) - family.resident_bytes(False) > 60 * 2**20


Node = dict[str, Any]


def test_nodes_are_asked_in_the_background_and_their_last_answers_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("grpo_ray.watch.memory.ASK_EVERY_S", 0.0)
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
