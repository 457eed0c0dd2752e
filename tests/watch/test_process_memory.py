"""The memory of a process and its children, what measuring it costs, and what object stores have spilled."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from run_process import PROGRAM, output_of, until
from small_run import QUICKSTART, SMALL

from grpo_ray.records.run_files import read_metrics
from grpo_ray.watch.memory import SEARCH_EVERY_S, ProcessFamily, SpilledBytes, resident_bytes

CHILD = "block = bytearray(b'x') * (64 * 2**20); print(flush=True); input()"


def test_children_count_and_are_searched_for_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """psutil looks at every process of the machine, and a step asks every actor."""
    status = Path("/proc/self/status").read_text()
    (own_kib,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    assert resident_bytes(with_children=False) == pytest.approx(own_kib * 1024, rel=0.05)
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
    command, pipe = [sys.executable, "-c", CHILD], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as child:
        child.stdout.readline()  # type: ignore[union-attr]
        now += SEARCH_EVERY_S  # so a younger child counts as well
        of_all = family.resident_bytes(True) - family.resident_bytes(False)
        child.communicate("\n")
    of_others = family.resident_bytes(True) - family.resident_bytes(False)  # the child has ended
    assert of_all - of_others > 60 * 2**20


def test_nodes_are_asked_in_the_background_and_the_last_answers_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_ray.watch.memory.ASK_EVERY_S", 0.0)
    answers: dict[str, int | None] = {"a": 3, "dead": None, "b": 4}
    may_answer, asked = threading.Event(), list[str]()

    def ask(node: dict[str, Any]) -> int:
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
    asked: list[dict[str, Any]] = []
    spilled = SpilledBytes(lambda: [{"NodeID": "a"}], lambda node: asked.append(node) or 3)  # type: ignore[func-returns-value]
    until(lambda: spilled.total() == 3)
    for _ in range(100):
        spilled.total()
    assert len(asked) == 1


EARLY, LATE = slice(50, 75), slice(125, 150)


@pytest.mark.ray
@pytest.mark.campaign
@pytest.mark.usefixtures("model_cache")
def test_memory_does_not_grow(tmp_path: Path) -> None:
    """After the first fifty steps no process grows by more than 4%.

    Over a thousand, a driver of 620 MB has two or three permanent jumps of 5 to 10 MB, and as many that pass.
    """
    command = [sys.executable, PROGRAM, "train", QUICKSTART, *SMALL, "algorithm.num_steps=150"]
    command += ["evaluation.every_num_steps=50", "checkpoint.every_num_steps=3", "run.save_rollouts=false"]
    output_of(*command, f"run.output_dir={tmp_path}", "run.name=run")
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    names = [name for name in rows[-1] if name.startswith("memory/") and "spilled" not in name]
    assert len(names) == 6  # the five actors and the driver
    for name in names:
        # On a busy machine an actor may not answer in time for one line or another.
        before, after = (min(row[name] for row in rows[part] if name in row) for part in (EARLY, LATE))
        assert after < 1.04 * before, name
    assert rows[-1]["memory/object_store_spilled_bytes"] == 0
