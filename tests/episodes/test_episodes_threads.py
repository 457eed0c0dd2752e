"""Threads of episodes: bad code costs its own episode alone, and threads that end are not stuck."""

import asyncio
import threading
from typing import Any

import pytest
from episode_players import said, session_of

from grpo_ray.episodes import threads
from grpo_ray.episodes.openai_server import ChatServer
from grpo_ray.episodes.outcome import Status
from grpo_ray.episodes.runner import EpisodeRunner
from grpo_ray.episodes.threads import EpisodeThread, RunningEpisode, StoppedThreads
from grpo_ray.tasks.examples import Example


async def _exits() -> float:
    raise SystemExit(3)


async def _begins_a_task_that_exits() -> float:
    try:
        return await asyncio.create_task(_exits())
    except SystemExit as error:
        raise RuntimeError("the task called exit") from error


async def _later() -> float:
    await asyncio.sleep(0.05)
    return 1.0


async def test_a_task_that_calls_exit_leaves_the_thread_to_the_other_episodes() -> None:
    thread = EpisodeThread("group")
    assert thread.loop  # which starts it
    running = [RunningEpisode(episode(), thread) for episode in (_begins_a_task_that_exits, _later)]
    try:
        async with asyncio.timeout(120):
            first, second = await asyncio.gather(*(each.done for each in running), return_exceptions=True)
    finally:
        thread.stop()
    assert isinstance(first, RuntimeError)
    assert second == 1.0


@pytest.mark.parametrize("num_failures", [1, 4])
async def test_a_thread_that_cannot_start_costs_its_episodes_and_no_place(
    num_failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, failures, loops = threading.Thread.start, iter(range(num_failures)), list[Any]()
    new_loop = asyncio.new_event_loop

    def limited(thread: threading.Thread) -> None:
        if thread.name == "group 1" and next(failures, None) is not None:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    monkeypatch.setattr(asyncio, "new_event_loop", lambda: loops.append(new_loop()) or loops[-1])
    server = ChatServer()
    runner = EpisodeRunner(lambda session, example: _later(), max_concurrent=4, server=server)
    for name, num_failed in (("group 1", num_failures), ("group 2", 0)):
        thread = EpisodeThread(name)
        sessions = [session_of("qwen2.5", said())[0] for _ in range(4)]
        runs = (runner.run(session, Example("", ""), thread) for session in sessions)
        async with asyncio.timeout(60):  # of 600 s that a lost place would be held
            results = await asyncio.gather(*runs)
        thread.stop()
        failed = [result for result in results if result.status is Status.ENVIRONMENT_ERROR]
        assert len(failed) == num_failed
        assert all("could not start (can't start new thread): raise" in result.error for result in failed)
        assert all(result.reward == 1.0 for result in results if result not in failed)
    assert server._sessions == {}
    assert all(loop.is_closed() for loop in loops[:num_failures])


def test_threads_that_wind_down_together_are_not_stuck() -> None:
    stopped = StoppedThreads()
    for number in range(64):
        thread = EpisodeThread(f"group {number}")
        assert thread.loop  # which starts it
        stopped.stop(thread)
        assert stopped.num_stuck() == 0


@pytest.mark.slow
async def test_a_call_of_to_thread_that_hangs_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """The episode itself ends when it is cancelled; only the call that it began in another thread goes on."""
    monkeypatch.setattr(threads, "WIND_DOWN_S", 0.0)
    stopped, thread, release = StoppedThreads(), EpisodeThread("group"), threading.Event()
    begun = threading.Event()

    def call(loop: asyncio.AbstractEventLoop) -> None:
        release.wait(30)
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(30)

    async def hangs() -> float:
        begun.set()
        await asyncio.to_thread(call, asyncio.get_running_loop())
        return 1.0

    running = RunningEpisode(hangs(), thread)
    await asyncio.to_thread(begun.wait, 5)
    running.cancel()
    try:
        await asyncio.wait({running.done}, timeout=5)
        assert running.done.cancelled()
        stopped.stop(thread)
        await asyncio.sleep(0.2)  # the thread has had its time to end
        assert stopped.num_stuck() == 1
        assert all(each.daemon for each in threading.enumerate() if "_answer" in each.name)
    finally:
        release.set()
    assert thread._thread is not None
    thread._thread.join(5)
    assert stopped.num_stuck() == 0
