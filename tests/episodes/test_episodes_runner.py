"""Running episodes: each ends with a name, and none disturbs another, its threads included."""

import asyncio
import contextlib
import gc
import sys
import threading
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from episode_players import HELLO, make_session, play, said, session_of, tokenizer_of

from grpo_ray.config import Config
from grpo_ray.config.episodes import EpisodesConfig
from grpo_ray.engines import derived_seed
from grpo_ray.episodes import runner as runner_module
from grpo_ray.episodes import threads
from grpo_ray.episodes.openai_server import ChatServer
from grpo_ray.episodes.outcome import EpisodeEnded, Outcome, Status
from grpo_ray.episodes.runner import EpisodeFn, EpisodeRunner, load_episode
from grpo_ray.episodes.session import Session
from grpo_ray.episodes.threads import EpisodeThread, RunningEpisode
from grpo_ray.run.preparation import _fit_part
from grpo_ray.tasks.examples import Example, ExampleSets
from grpo_ray.types import Episode


def new_session(limits: EpisodesConfig | None = None) -> Session:
    return session_of("qwen2.5", lambda prompt: "reply", limits)[0]


def run(episode: EpisodeFn, limits: EpisodesConfig | None = None) -> Episode:
    return play(episode, new_session(limits))


async def one_turn(session: Session, example: Example) -> float:
    reply = await session.chat([{"role": "user", "content": example.question}])
    return float(reply.text == example.ground_truth)


async def endless(session: Session, example: Example) -> float:
    messages = [{"role": "user", "content": example.question}]
    while True:
        messages += [(await session.chat(messages)).message, {"role": "user", "content": "more"}]


def test_an_episode_that_returns_is_finished_with_rewards_per_turn_and_metrics() -> None:
    async def episode(session: Session, example: Example) -> Outcome:
        for _ in range(2):
            await one_turn(session, example)
        return Outcome(0.5, turn_rewards=(0.0, 0.5), metrics={"score": 3.0})

    result = run(episode)
    assert (result.status, result.error, result.num_turns) == (Status.FINISHED, "", 2)
    assert (result.reward, result.turn_rewards, result.metrics) == (0.5, (0.0, 0.5), {"score": 3.0})
    assert result.seconds > 0


def test_limits_have_names() -> None:
    for limits, status, reason in (
        (EpisodesConfig(max_turns=3), Status.TRUNCATED_TURNS, "has had its 3 turns"),
        (EpisodesConfig(max_tokens=100), Status.TRUNCATED_TOKENS, "leaves no room for a reply within 100"),
    ):
        result = run(endless, limits)
        assert (result.status, result.reward) == (status, 0.0)
        assert reason in result.error
        assert result.num_turns >= 3
        (sequence,) = result.sequences
        assert len(sequence.prompt_token_ids) + sequence.end <= limits.max_tokens


def test_a_reply_is_cut_to_the_room_that_is_left() -> None:
    result = play(one_turn, session_of("qwen2.5", lambda prompt: [5] * 500, EpisodesConfig(max_tokens=60))[0])
    (sequence,) = result.sequences
    assert len(sequence.prompt_token_ids) + sequence.end == 60


def test_an_episode_may_answer_its_limit_with_a_reward() -> None:
    async def episode(session: Session, example: Example) -> float:
        try:
            return await endless(session, example)
        except EpisodeEnded:
            return -1.0

    result = run(episode, EpisodesConfig(max_turns=2))
    assert (result.status, result.reward) == (Status.TRUNCATED_TURNS, -1.0)
    assert run(endless, EpisodesConfig(max_turns=2, truncated_reward=-0.5)).reward == -0.5


def test_calls_beyond_a_limit_lose_no_reply_on_its_way() -> None:
    async def episode(session: Session, example: Example) -> float:
        await asyncio.gather(*(one_turn(session, Example(f"branch {n}", "")) for n in range(5)))
        return 1.0

    result = run(episode, EpisodesConfig(max_turns=3))
    assert (result.status, result.reward) == (Status.TRUNCATED_TURNS, 0.0)
    assert (result.num_turns, len(result.sequences)) == (3, 3)


def test_an_error_after_a_limit_is_seen() -> None:
    async def episode(session: Session, example: Example) -> Outcome:
        with contextlib.suppress(EpisodeEnded):
            await endless(session, example)
        if session.limits.max_tokens > 1000:
            return Outcome(1.0, turn_rewards=(1.0, 1.0, 1.0))
        raise KeyError("score")

    assert run(episode, EpisodesConfig(max_turns=2, max_tokens=5000)).status == Status.ENVIRONMENT_ERROR
    result = run(episode, EpisodesConfig(max_turns=2, max_tokens=1000))
    assert (result.status, result.reward) == (Status.TRUNCATED_TURNS, 0.0)
    assert result.error.endswith("; then it raised KeyError: 'score'")


@pytest.mark.slow
async def test_an_episode_that_ignores_its_cancellation_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "GRACE_S", 0.1)
    late: list[BaseException] = []

    async def episode(session: Session, example: Example) -> float:
        while not late:
            try:
                await asyncio.sleep(0.3)
                await session.chat([{"role": "user", "content": "late"}])
            except asyncio.CancelledError:
                continue
            except EpisodeEnded as end:
                late.append(end)
        return 1.0

    result = await EpisodeRunner(episode).run(new_session(EpisodesConfig(max_seconds=0.1)), HELLO)
    await asyncio.sleep(0.8)
    assert result.status == Status.TRUNCATED_TIME
    assert "ignored its cancellation" in result.error
    assert late  # its session samples no more
    assert result.num_turns == 0


async def test_what_an_episode_held_when_it_failed_is_freed_at_once() -> None:
    class Hoard:
        """All memory that the worker may have."""

        error: MemoryError | None = None

    held: list[weakref.ref[Hoard]] = []

    def take_all() -> None:
        hoard = Hoard()
        held.append(weakref.ref(hoard))
        try:
            raise MemoryError
        except MemoryError as error:
            hoard.error = error  # a circle: the error has this frame, which has the hoard
            raise

    async def takes_all(session: Session, example: Example) -> float:
        try:
            take_all()
        except MemoryError:
            raise OSError("no room for the message either")  # noqa: B904
        return 1.0

    gc.disable()
    try:
        result = await EpisodeRunner(takes_all).run(new_session(), HELLO)
        assert "no room for the message either" in result.error
        assert held[0]() is None
    finally:
        gc.enable()


def test_a_generator_that_fails_is_no_error_of_the_environment() -> None:
    class Failing:
        async def sample(self, *_: Any) -> Any:
            raise RuntimeError("the engine died")

    async def careless(session: Session, example: Example) -> float:
        try:
            return await one_turn(session, example)
        except Exception:
            return 1.0

    for episode in (one_turn, careless):
        result = play(episode, make_session(Failing(), tokenizer_of("qwen2.5")))
        assert (result.status, result.reward) == (Status.GENERATOR_ERROR, None)
        assert result.error == "RuntimeError: the engine died"


def test_turns_have_seeds_of_their_own() -> None:
    session, sampler = session_of("qwen2.5", lambda prompt: "reply", EpisodesConfig(max_turns=4), seed=7)
    play(endless, session)
    seeds = [settings.seed for settings in sampler.settings]
    assert seeds == [7, *(derived_seed(7, turn) for turn in range(1, 4))]
    assert len(set(seeds)) == 4
    session, sampler = session_of("qwen2.5", lambda prompt: "reply", EpisodesConfig(max_turns=4))
    play(endless, session)
    assert [settings.seed for settings in sampler.settings] == [None] * 4


def test_episodes_are_found_by_their_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    functions = ("async def good(session, example): return 1.0", "def plain(session, example): ...")
    (tmp_path / "my_game.py").write_text("\n".join([*functions, "async def one(session): ..."]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert run(load_episode("my_game:good")).reward == 1.0
    for name, message in (
        ("my_game:plain", "task.episode: my_game:plain must be an `async def`"),
        ("my_game:one", r"task.episode: my_game:one must take \(session, example\)"),
        ("my_game:none", "task.episode: 'my_game' has no function 'none'"),
        ("no_game:good", "task.episode: there is no module 'no_game'"),
    ):
        with pytest.raises(ValueError, match=message):
            load_episode(name)


def test_an_episode_may_be_as_long_as_the_model_and_the_engine_take_and_no_longer() -> None:
    def fit(positions: int | None, **generator: int) -> None:
        task = {"kind": "episodes", "episode": "games:play", "examples": "games:examples"}
        options = {"episodes": {"max_tokens": 96}, "sampling": {"max_tokens": 8}, "generator": generator}
        config: Any = Config.model_validate({"model": {"path": "m"}, "task": task, **options})
        _fit_part(config, config.task, ExampleSets([], []), Mock(), positions)

    for positions in (None, 96, 1000):
        fit(positions)
        fit(positions, max_model_len=96)
    with pytest.raises(ValueError, match=r"more than the model's positions \(95\); set it to at most 95"):
        fit(95, max_model_len=96)
    with pytest.raises(ValueError, match=r"max_tokens is 96, more than generator\.max_model_len \(95\)"):
        fit(None, max_model_len=95)


# ---- threads: bad code costs its own episode alone, and threads that end are not stuck ----


async def _exits(end: BaseException) -> float:
    raise end


async def _begins_a_task_that_exits(end: BaseException) -> float:
    try:
        return await asyncio.create_task(_exits(end))
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError("the task called exit") from error


async def _later() -> float:
    await asyncio.sleep(0.05)
    return 1.0


@pytest.mark.parametrize("end", [SystemExit(3), KeyboardInterrupt()])
async def test_a_task_that_calls_exit_leaves_the_thread_to_the_other_episodes(end: BaseException) -> None:
    thread = EpisodeThread("group")
    assert thread.loop  # which starts it
    running = [RunningEpisode(episode, thread) for episode in (_begins_a_task_that_exits(end), _later())]
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
        failed = [result for result in results if result.status == Status.ENVIRONMENT_ERROR]
        assert len(failed) == num_failed
        assert all("could not start (can't start new thread): raise" in result.error for result in failed)
        assert [r.reward for r in results if r.status == Status.FINISHED] == [1.0] * (4 - num_failed)
    assert server._sessions == {}
    assert all(loop.is_closed() for loop in loops[:num_failures])


def test_threads_that_wind_down_together_are_not_stuck() -> None:
    stopped = [EpisodeThread(f"group {number}") for number in range(64)]
    for thread in stopped:
        assert thread.loop  # which starts it
        thread.stop()
        assert not any(each.is_stuck for each in stopped)


@pytest.mark.slow
async def test_a_call_of_to_thread_that_hangs_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """The episode itself ends when it is cancelled; only the call that it began in another thread goes on."""
    monkeypatch.setattr(threads, "WIND_DOWN_S", 0.0)
    thread, release, begun = EpisodeThread("group"), threading.Event(), threading.Event()

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
        thread.stop()
        await asyncio.sleep(0.2)  # the thread has had its time to end
        assert thread.is_stuck
        assert all(each.daemon for each in threading.enumerate() if "settle" in each.name)
    finally:
        release.set()
    thread._thread.join(5)
    assert not thread.is_stuck
