"""The count of processes that tests start."""

import os
import subprocess
import sys
import threading

import process_census
import pytest
from process_census import FREE_CPU_S, Census, CensusPlugin, cpu_seconds_of

CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"


def settle(census: Census) -> None:
    """See the processes of earlier tests, and what they have needed."""
    for _ in range(2):
        census.scan()


def test_programs_that_need_a_processor_are_counted_and_so_are_their_children(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
