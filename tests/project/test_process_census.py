"""The suite's own rules: the count of processes that tests start, and the cases of a table that stay."""

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import process_census
import pytest
from conftest import leave_the_others_to_the_campaign
from process_census import FREE_CPU_S, Census, CensusPlugin, cpu_seconds_of

CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"


def settle(census: Census) -> None:
    """See the processes of earlier tests, and what they have needed."""
    for _ in range(2):
        census.scan()


def test_programs_that_need_a_processor_and_their_children_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_census, "cpu_seconds_of", lambda pid: FREE_CPU_S)
    census = Census(os.getpid())
    settle(census)
    before = census.counts()["other programs"]
    with subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, text=True) as process:
        while census.counts()["other programs"] < before + 2:
            census.scan()
        process.communicate("\n")
    census.scan()
    assert census.counts()["other programs"] == before + 2  # they have ended, and are counted all the same


def test_threads_and_forks_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_census, "cpu_seconds_of", lambda pid: FREE_CPU_S)
    census, may_end = Census(os.getpid()), threading.Event()
    settle(census)
    before = census.counts()
    threading.Thread(target=may_end.wait).start()
    reading, writing = os.pipe()
    if (forked := os.fork()) == 0:
        os.read(reading, 1)
        os._exit(0)
    settle(census)
    os.write(writing, b"x")
    os.waitpid(forked, 0)
    may_end.set()
    assert census.counts() == before


def test_a_program_that_needs_little_is_free_however_long_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_census, "cpu_seconds_of", lambda pid: FREE_CPU_S / 2)
    census = Census(os.getpid())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True) as process:
        for _ in range(9):
            census.scan()
        process.communicate("\n")
    assert census.counts()["other programs"] == 0
    assert cpu_seconds_of(os.getpid()) > 0
    assert cpu_seconds_of(2**22 + 1) == 0  # no process has this number


def test_beyond_a_budget_it_says_of_what() -> None:
    plugin = CensusPlugin(counts_here=False)
    plugin._total.update({"clusters of Ray": 7, "other programs": 40})
    assert plugin.exceeded() == ["clusters of Ray"]


KEPT = pytest.mark.kept("y/[0]").mark


def left(cases: Sequence[str], *args: str, last_failed: bool = False, session: Any = None) -> list[str]:
    """Return the cases that are left to the campaign when `pytest *args` has collected these, and a test."""
    marked: list[str] = []
    items: list[Any] = [
        SimpleNamespace(
            nodeid=f"tests/test_one.py::test_a[{case}]",
            get_closest_marker=lambda name: KEPT if name == "kept" else None,
            add_marker=lambda _, case=case: marked.append(case),
            session=session,
        )
        for case in cases
    ]
    items.append(SimpleNamespace(nodeid="tests/test_two.py::test_b", get_closest_marker=lambda name: None))
    config: Any = SimpleNamespace(args=list(args), getoption=lambda name, default: last_failed)
    leave_the_others_to_the_campaign(config, items)
    return marked


def test_cases_that_are_not_kept_are_left_to_the_campaign_and_may_be_asked_for_alone() -> None:
    assert left(["x", "y/[0]"], "../tests") == ["x"]
    assert left(["x"], "../tests/test_one.py::test_a[x]", "../tests/test_two.py") == ["x"]
    assert left(["x"], last_failed=True) == ["x"]


def test_a_kept_case_that_the_test_lacks_is_an_error() -> None:
    session: Any = SimpleNamespace(shouldfail=False)
    text = r"test_one\.py::test_a is to keep \['y/\[0\]'\], and its cases are \['x', 'z'\]$"
    with pytest.raises(pytest.UsageError, match=text) as caught:
        left(["z", "x"], "../tests", session=session)
    assert session.shouldfail == str(caught.value)  # it is all that is seen of a worker's error
