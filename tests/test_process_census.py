"""The count of processes that tests start."""

import os
import subprocess
import sys
import threading

from process_census import NUM_SCANS, Census, CensusPlugin

CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"


def settle(census: Census) -> None:
    """Let processes of earlier tests grow old."""
    for _ in range(NUM_SCANS + 1):
        census.scan()


def test_programs_that_live_on_are_counted_and_so_are_their_children() -> None:
    census = Census(os.getpid())
    settle(census)
    before = census.counts()["other programs"]
    with subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, text=True) as process:
        while census.counts()["other programs"] < before + 2:
            census.scan()
        process.communicate("\n")
    census.scan()
    assert census.counts()["other programs"] == before + 2  # they have ended, and are counted all the same


def test_threads_forks_and_what_is_short_are_free() -> None:
    census, may_end = Census(os.getpid()), threading.Event()
    settle(census)
    before = census.counts()
    threading.Thread(target=may_end.wait).start()
    reading, writing = os.pipe()
    if (forked := os.fork()) == 0:
        os.read(reading, 1)
        os._exit(0)
    settle(census)
    subprocess.run([sys.executable, "-c", ""], check=True)
    census.scan()
    os.write(writing, b"x")
    os.waitpid(forked, 0)
    may_end.set()
    assert census.counts() == before


def test_beyond_a_budget_it_says_of_what() -> None:
    plugin = CensusPlugin(counts_here=False)
    plugin._total.update({"clusters of Ray": 7, "other programs": 40})
    assert plugin.exceeded() == ["clusters of Ray"]
