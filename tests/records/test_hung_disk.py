"""Records on a file system that hangs: in order, reported, and left behind in the end."""

import asyncio
import threading
import time

import pytest

from grpo_ray.watch.background import BackgroundThread


async def test_jobs_run_in_order_and_their_errors_are_not_lost() -> None:
    thread, done = BackgroundThread("test"), []
    for number in range(5):
        thread.submit("a job", lambda number=number: done.append(number))
    assert thread.wait(5)
    assert done == [0, 1, 2, 3, 4]
    assert await thread.run("a job", lambda: 7) == 7
    with pytest.raises(OSError, match="full"):
        await thread.run("a job", _full)
    assert thread.problem() is None
    thread.submit("a bug", lambda: done[99])
    thread.submit("a job", lambda: done.append(5))
    assert thread.wait(60)
    assert thread.problem() == "a bug has failed: IndexError: list index out of range"
    assert done[-1] == 5  # one mistake stops no other record


@pytest.mark.slow
def test_a_job_that_hangs_is_reported_and_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    thread, may_end, done = BackgroundThread("test"), threading.Event(), []
    assert thread.problem() is None
    monkeypatch.setattr("grpo_ray.watch.background.SLOW_S", 0.05)
    thread.submit("the line of step 3", lambda: may_end.wait(30))
    thread.submit("the line of step 4", lambda: done.append(4))
    time.sleep(0.1)
    problem = thread.problem() or ""
    assert "the line of step 3 has not been written for" in problem
    assert "1 more records wait in memory" in problem
    assert not thread.wait(0.05)
    assert not thread.close(0.05)
    may_end.set()
    thread._thread.join(5)
    assert done == []  # the run may have been restored since


async def test_a_job_whose_caller_was_cancelled_does_not_run() -> None:
    thread, may_end, done = BackgroundThread("test"), threading.Event(), []
    thread.submit("hangs", lambda: may_end.wait(30))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await thread.run("a checkpoint", lambda: done.append(1))
    may_end.set()
    assert thread.wait(5)
    assert done == []


def _full() -> None:
    raise OSError(28, "the disk is full")
