"""Running episodes: each ends with a name, and costs no other whatever it returns or raises, nor its thread."""

import asyncio
import contextlib
import gc
import json
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest
import torch
from episode_groups import make_episode_group
from episode_players import ANY_TEXTS, HELLO, JSON, TOOL, make_session, play, said, session_of, tokenizer_of
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from local_runs import train

from grpo_ray.config import Config
from grpo_ray.config.episodes import EpisodesConfig
from grpo_ray.config.loading import load_config
from grpo_ray.engines import derived_seed
from grpo_ray.episodes import runner as runner_module
from grpo_ray.episodes import threads
from grpo_ray.episodes.openai_server import ChatServer
from grpo_ray.episodes.outcome import EpisodeEnded, Outcome, Status
from grpo_ray.episodes.runner import EpisodeFn, EpisodeRunner, load_episode
from grpo_ray.episodes.session import Session
from grpo_ray.episodes.threads import EpisodeThread, RunningEpisode
from grpo_ray.episodes.tool_calls import checked
from grpo_ray.records.rollout_log import read_rollouts, write_rollouts
from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.run.preparation import _fit_part
from grpo_ray.tasks.examples import Example, ExampleSets
from grpo_ray.tools.audit.audit import audit
from grpo_ray.types import Episode
from grpo_ray.watch.batch_metrics import rollout_metrics


def new_session(limits: EpisodesConfig | None = None) -> Session:
    return session_of("qwen2.5", lambda prompt: "reply", limits)[0]


def played(episode: EpisodeFn, limits: EpisodesConfig | None = None) -> Episode:
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

    result = played(episode)
    assert (result.status, result.error, result.num_turns) == (Status.FINISHED, "", 2)
    assert (result.reward, result.turn_rewards, result.metrics) == (0.5, (0.0, 0.5), {"score": 3.0})
    assert result.seconds > 0


def test_limits_have_names() -> None:
    for limits, status, reason in (
        (EpisodesConfig(max_turns=3), Status.TRUNCATED_TURNS, "has had its 3 turns"),
        (EpisodesConfig(max_tokens=100), Status.TRUNCATED_TOKENS, "leaves no room for a reply within 100"),
    ):
        result = played(endless, limits)
        assert (result.status, result.reward) == (status, 0.0)
        assert reason in result.error
        assert result.num_turns >= 3
        (sequence,) = result.sequences
        assert len(sequence.prompt_token_ids) + sequence.end <= limits.max_tokens
    # A reply is cut to the room that is left.
    result = play(one_turn, session_of("qwen2.5", lambda prompt: [5] * 500, EpisodesConfig(max_tokens=60))[0])
    (sequence,) = result.sequences
    assert len(sequence.prompt_token_ids) + sequence.end == 60


def test_an_episode_may_answer_its_limit_with_a_reward() -> None:
    async def episode(session: Session, example: Example) -> float:
        try:
            return await endless(session, example)
        except EpisodeEnded:
            return -1.0

    result = played(episode, EpisodesConfig(max_turns=2))
    assert (result.status, result.reward) == (Status.TRUNCATED_TURNS, -1.0)
    assert played(endless, EpisodesConfig(max_turns=2, truncated_reward=-0.5)).reward == -0.5


def test_calls_beyond_a_limit_lose_no_reply_on_its_way() -> None:
    async def episode(session: Session, example: Example) -> float:
        await asyncio.gather(*(one_turn(session, Example(f"branch {n}", "")) for n in range(5)))
        return 1.0

    result = played(episode, EpisodesConfig(max_turns=3))
    assert (result.status, result.reward) == (Status.TRUNCATED_TURNS, 0.0)
    assert (result.num_turns, len(result.sequences)) == (3, 3)


def test_an_error_after_a_limit_is_seen() -> None:
    async def episode(session: Session, example: Example) -> Outcome:
        with contextlib.suppress(EpisodeEnded):
            await endless(session, example)
        if session.limits.max_tokens > 1000:
            return Outcome(1.0, turn_rewards=(1.0, 1.0, 1.0))
        raise KeyError("score")

    assert played(episode, EpisodesConfig(max_turns=2, max_tokens=5000)).status == Status.ENVIRONMENT_ERROR
    result = played(episode, EpisodesConfig(max_turns=2, max_tokens=1000))
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
    failing = Mock(sample=AsyncMock(side_effect=RuntimeError("the engine died")))

    async def careless(session: Session, example: Example) -> float:
        try:
            return await one_turn(session, example)
        except Exception:
            return 1.0

    for episode in (one_turn, careless):
        result = play(episode, make_session(failing, tokenizer_of("qwen2.5")))
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
    assert played(load_episode("my_game:good")).reward == 1.0
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


async def _begins_a_task_that_exits(end: BaseException) -> float:
    try:
        return await asyncio.create_task(AsyncMock(side_effect=end)())
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


# ---- all that an episode returns or raises can cost that episode, and nothing else ----


HALF = "\ud83d"  # of a surrogate pair; a model writes it as "\\ud83d" in JSON


class Unknown:
    """A value that cannot be converted, nor shown."""

    def __float__(self) -> float:
        raise RuntimeError("no number")

    def __repr__(self) -> str:
        raise RuntimeError("no text")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Base(BaseException):
    """An error that is no Exception."""


def changed_later() -> Outcome:
    outcome = Outcome(1.0)
    outcome.metrics["late"] = "text"  # type: ignore[index]
    return outcome


def raises(error: BaseException, notes: Sequence[str] = ()) -> Callable[[], NoReturn]:
    def end() -> NoReturn:
        for note in notes:
            error.add_note(note)
        raise error

    return end


def circle() -> NoReturn:
    first, second = ValueError("first"), ValueError("second")
    first.__context__, second.__context__ = second, first
    raise first


def odd_syntax() -> NoReturn:
    error = SyntaxError("odd")
    error.filename, error.lineno, error.text, error.offset = "file", 1, "text", "place"  # type: ignore[assignment]
    raise error


# What a model's text or a mistake in an environment can bring about: each returns what an episode function
# returns, or raises what it raises.
ENDINGS: dict[str, Callable[[], Any]] = {
    "half a pair in an error": raises(ValueError(f"there is no place {HALF}")),
    "half a pair in a cause": raises(ExceptionGroup(HALF, [ValueError(HALF)])),
    "name of a file that is not UTF-8": raises(FileNotFoundError(2, "no such file", "caf\udce9")),
    "names that are no text": lambda: Outcome(1.0, metrics={7: 1.0, "a": 1.0}),  # type: ignore[dict-item]
    "a metric beyond its bound": lambda: Outcome(1.0, metrics={"m": 10**31}),
    "a metric beyond all floats": lambda: Outcome(1.0, metrics={"m": 10**400}),
    "a metric with too many digits to print": lambda: Outcome(1.0, metrics={"m": 10**5000}),
    "a metric that is not finite": lambda: Outcome(1.0, metrics={"m": np.float32("inf")}),
    "a metric that is text": lambda: Outcome(1.0, metrics={"m": "1"}),  # type: ignore[dict-item]
    "a long name": lambda: Outcome(1.0, metrics={"x" * 100_000: 1.0}),
    "many names": lambda: Outcome(1.0, metrics={f"m{n}": 1.0 for n in range(65)}),
    "metrics that are a list": lambda: Outcome(1.0, metrics=[1.0]),  # type: ignore[arg-type]
    "a metric that is added later": changed_later,
    "a reward beyond its bound": lambda: 1e300,
    "a reward that is not finite": lambda: torch.tensor(float("nan")),
    "a reward that is text": lambda: "0.5",
    "no reward": lambda: None,
    "two rewards": lambda: np.array([0.5, 0.5]),
    "a reward that is complex": lambda: 1j,
    "a reward that cannot be shown": Unknown,
    "a turn's reward beyond its bound": lambda: Outcome(1.0, (-1e300,)),
    "rewards of too many turns": lambda: Outcome(1.0, (0.5, 0.5, 0.5)),
    "a mapping in place of rewards of turns": lambda: Outcome(1.0, {0: 0.5}),  # type: ignore[arg-type]
    "an error that cannot be shown": raises(Unspeakable()),
    "an error with odd attributes": odd_syntax,
    "errors in a circle": circle,
    "no Exception": raises(Base("bye")),
    "Ctrl-C": raises(KeyboardInterrupt()),
    "the end of a generator": raises(GeneratorExit()),
    "the end of an iteration": raises(StopIteration()),
    "an exit": raises(SystemExit(3)),
    "a cancellation": raises(asyncio.CancelledError()),
}
UNFINISHED = {"a result that is not there yet": raises(asyncio.InvalidStateError())}
GOOD: dict[str, tuple[Callable[[], Any], float]] = {
    "NumPy's float": (lambda: np.float32(0.5), 0.5),
    "torch's float": (lambda: torch.tensor(0.5), 0.5),
    "an outcome of torch": (lambda: Outcome(torch.tensor(0.5), metrics={"m": torch.tensor(2)}), 0.5),  # type: ignore[arg-type, dict-item]
    "a truth value": (lambda: True, 1.0),
    "half a pair in a name": (lambda: Outcome(0.5, metrics={f"tool/{HALF}": 1}), 0.5),
    "a whole number": (lambda: Outcome(10**12, metrics={"m": 10**30}), 1e12),
}
CALL = '<tool_call>\n{"name": %s, "arguments": %s}\n</tool_call>'


def ended(end: Callable[[], Any], limits: EpisodesConfig | None = None) -> Episode:
    """Play an episode of one turn that ends so."""

    async def episode(session: Session, example: Example) -> Any:
        await session.chat([{"role": "user", "content": example.question}])
        return end()

    return play(episode, session_of("qwen2.5", said("reply"), limits)[0])


def check_stored(results: Sequence[Episode], folder: Path) -> None:
    """Check that the episodes can be scored, counted and written as they are."""
    group = make_episode_group(3, results)
    metrics = rollout_metrics([group])
    assert json.loads(json.dumps(metrics, allow_nan=False)) == metrics
    assert write_rollouts(folder / "rollouts.parquet", 1, [group]) is None
    rows = read_rollouts(folder / "rollouts.parquet")
    assert [row["episode_error"] for row in rows] == [result.error for result in results]
    assert [row["episode_reward"] for row in rows] == [result.reward for result in results]
    assert [dict(row["metrics"]) for row in rows] == [result.metrics for result in results]


@pytest.mark.parametrize("name", [*ENDINGS, *UNFINISHED])
def test_a_bad_ending_is_an_error_of_its_episode(name: str, tmp_path: Path) -> None:
    result = ended((ENDINGS | UNFINISHED)[name])
    expected = Status.CANCELLED if name == "a cancellation" else Status.ENVIRONMENT_ERROR
    assert (result.status, result.reward) == (expected, None)
    assert len(result.error) < 12_000
    assert result.num_tokens > 0  # its tokens are kept for the record
    check_stored([result, ended(lambda: 1.0)], tmp_path)


@pytest.mark.parametrize("name", GOOD)
def test_numbers_of_other_libraries_become_floats(name: str, tmp_path: Path) -> None:
    end, reward = GOOD[name]
    result = ended(end)
    assert (result.status, result.reward, result.error) == (Status.FINISHED, reward, "")
    assert {type(value) for value in (result.reward, *result.metrics.values())} == {float}
    check_stored([result, ended(lambda: 0.0)], tmp_path)


def test_messages_name_the_field() -> None:
    for name, message in (
        ("a metric beyond its bound", "as the metric 'm'; return a finite number within +-1e+30"),
        ("a turn's reward beyond its bound", "returned -1e+300 as a reward of a turn; return a finite number"),
        ("a reward that is text", "returned '0.5' as its reward; return a finite number within +-1e+12, or an"),
        ("rewards of too many turns", "3 turn_rewards for 1 sampled turns"),
        ("a mapping in place of rewards of turns", "returned {0: 0.5} as turn_rewards; list a number"),
        ("metrics that are a list", "returned [1.0] as metrics; return a dict of numbers by name"),
        ("a reward that cannot be shown", "returned a value of type Unknown as its reward"),
        ("many names", "returned 65 metrics; return at most 64"),
        ("names that are no text", "a metric named 7; a name is text of 1 to 100 characters"),
        ("an error that cannot be shown", "Unspeakable: <exception str() failed>"),
        ("an error with odd attributes", "SyntaxError, of which no traceback can be shown"),
        ("half a pair in an error", r"ValueError: there is no place \ud83d"),
        ("half a pair in an error", "test_episodes_runner.py"),  # where it was raised
        ("an exit", "the episode called exit(3)"),
        ("Ctrl-C", "the episode raised KeyboardInterrupt"),
    ):
        assert message in ended(ENDINGS[name]).error
    assert Outcome(1.0, metrics={HALF: 1}).metrics == {r"\ud83d": 1.0}
    with pytest.raises(ValueError, match=r"returned 0\.5 as turn_rewards; list a number per turn"):
        Outcome(1.0, 0.5)  # type: ignore[arg-type]


def test_an_error_earns_what_the_configuration_says(tmp_path: Path) -> None:
    result = ended(ENDINGS["half a pair in an error"], EpisodesConfig(max_tokens=5000, error_reward=-0.5))
    assert (result.status, result.reward) == (Status.ENVIRONMENT_ERROR, -0.5)
    assert "there is no place" in result.error
    check_stored([result, ended(lambda: 0.5)], tmp_path)
    group = make_episode_group(3, [result, ended(lambda: 0.5)])
    assert group.errors == {}
    assert group.advantages[0] < 0 < group.advantages[1]


# ---- a model's text ----


def call_of(reply: str) -> tuple[Any, Any]:
    """Return the calls that an environment sees of a reply, and the prompt after their result."""
    session, sampler = session_of("qwen2.5", lambda prompt: reply, parser="transformers")

    async def turns() -> Any:
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"where {HALF}?"}]
        first = await session.chat(messages, tools=[TOOL])
        shown = "".join(f"no {call.name} {call.arguments}" for call in first.tool_calls)
        messages += [first.message, {"role": "tool", "content": f"{shown} {HALF}"}]
        await session.chat(messages, tools=[TOOL])
        return first.tool_calls

    return asyncio.run(turns()), tokenizer_of("qwen2.5").decode(list(sampler.prompts[-1]))


def test_half_of_a_pair_in_a_call_ends_no_episode() -> None:
    (call,), prompt = call_of(CALL % ('"look"', r'{"place": "\ud83d", "in \udc00": [{"a": "\udfff"}]}'))
    assert (call.name, call.arguments) == ("look", {"place": "?", "in ?": [{"a": "?"}]})
    assert r"where \ud83d?" in prompt
    assert r"no look {'place': '?'" in prompt


def test_a_parser_that_fails_leaves_text() -> None:
    errors = TypeError("a"), KeyError("b"), AttributeError("c"), RecursionError("d"), IndexError("e")
    for error in (*errors, OSError("f"), AssertionError("g")):

        def broken(*_: Any, error: Exception = error) -> Any:
            raise error

        with pytest.raises(ValueError, match=type(error).__name__):
            checked(broken)([], [], [])


WHOLE = st.integers() | st.integers(-(10**400), 10**400)
NUMBERS = st.floats() | WHOLE | st.booleans() | st.none() | ANY_TEXTS | st.binary(max_size=3)
METRICS = st.dictionaries(st.one_of(ANY_TEXTS, st.integers(), st.just("x" * 101)), NUMBERS, max_size=4)
TURNS = st.none() | st.lists(NUMBERS, max_size=2)
OUTCOMES = st.builds(lambda *fields: lambda: Outcome(*fields), NUMBERS, TURNS, METRICS)
KINDS = st.sampled_from([ValueError, KeyError, OSError, Base, SystemExit, SyntaxError, StopIteration])
NOTES = st.lists(ANY_TEXTS, max_size=2)
ERRORS = st.builds(lambda kind, text, notes: raises(kind(text), notes), KINDS, ANY_TEXTS, NOTES)
FUZZED = st.one_of(OUTCOMES, ERRORS, NUMBERS.map(lambda number: lambda: number))
MANY = pytest.mark.parametrize("num_examples", [60, pytest.param(2000, marks=pytest.mark.campaign)])


@pytest.mark.slow
@MANY
def test_any_ending_can_be_stored(num_examples: int, tmp_path: Path) -> None:
    @settings(max_examples=num_examples)
    @given(end=FUZZED)
    def check(end: Callable[[], Any]) -> None:
        result = ended(end)
        assert result.status in (Status.FINISHED, Status.ENVIRONMENT_ERROR)
        assert (result.reward is None) == (result.status == Status.ENVIRONMENT_ERROR)
        check_stored([result], tmp_path)

    check()


@pytest.mark.slow
@MANY
def test_any_call_can_be_stored(num_examples: int) -> None:
    """A model writes a call in ASCII, and the environment answers with what it was asked."""

    @settings(max_examples=num_examples)
    @given(name=st.just("look") | JSON, arguments=JSON)
    @example(name=["look"], arguments={})
    def check(name: Any, arguments: Any) -> None:
        reply = CALL % (json.dumps(name), json.dumps(arguments))
        # The sampler's limit of 500 tokens, each a character or more, would cut off a longer one.
        assume(len(reply) < 480)
        calls, _ = call_of(reply)
        assert len(calls) == (isinstance(name, str) and isinstance(arguments, dict))
        for call in calls:
            f"{call.name} {call.arguments}".encode()
            json.dumps(call.arguments, ensure_ascii=False).encode()

    check()


num_played: Counter[str] = Counter()


async def one_bad_ending(session: Session, example: Example) -> Any:
    """Take a turn; the first episode of each training group ends as its example says, the others well.

    Those return the largest rewards, and each of them 50 names of metrics that no other has.
    """
    reply = await session.chat([{"role": "user", "content": example.question}])
    num_played[example.ground_truth] += 1
    if example.ground_truth in ENDINGS and num_played[example.ground_truth] == 1:
        return ENDINGS[example.ground_truth]()
    sign = 2 * (sum(reply.text.encode()) % 2) - 1
    num_played["names"] += 50
    names = [f"n{n}" for n in range(num_played["names"], num_played["names"] + 50)]
    return Outcome(sign * 1e12, metrics={"asked": 1.0, **dict.fromkeys(names, 1.0)})


def examples(seed: int) -> ExampleSets:
    found = [Example(f"Say a number above {n}.", name) for n, name in enumerate(ENDINGS)]
    return ExampleSets(found, [Example(f"Say a number above {n}.", "good") for n in range(90, 92)])


@pytest.mark.slow
@pytest.mark.usefixtures("model_cache")
def test_a_run_loses_only_what_ends_badly_trains_on_any_reward_and_bounds_names(run: RunDirectory) -> None:
    names = [f"task.episode={__name__}:one_bad_ending", f"task.examples={__name__}:examples",
             "task.warmup=small_episodes:warmup_pairs"]  # fmt: skip
    sizes = ["algorithm.num_steps=4", f"algorithm.prompts_per_step={len(ENDINGS) // 4}"]
    config = Path(__file__).parents[1] / "small_episodes.yaml"
    train(load_config(config, [*names, *sizes, "algorithm.advantage=mean"]), run.path)
    metrics = read_metrics(run.metrics_path)
    assert [(row["step"], row["optim/skipped_updates"]) for row in metrics] == [(n, 0) for n in range(1, 5)]
    assert any(row["optim/grad_norm"] > 1e6 for row in metrics)
    rows = [row for path in sorted(run.rollouts.iterdir()) for row in read_rollouts(path)]
    groups = {name: list(rows) for name, rows in groupby(rows, lambda row: row["ground_truth"])}
    assert groups.keys() == ENDINGS.keys()
    for name, members in groups.items():
        found = sorted((row["status"], row["episode_reward"] is None) for row in members)
        bad = "cancelled" if name == "a cancellation" else "environment_error"
        assert found == sorted([(bad, True), ("finished", False), ("finished", False)]), name
    assert (run.checkpoint_path(4) / "training").is_dir()
    assert audit(run).problems == []
    assert not run.skipped.exists()
    evaluations = read_metrics(run.evaluations_summary_path)
    own = [name for row in metrics for name in row if "episodes/metrics/" in name]
    own = [name for name in own if not name.startswith("eval/")]
    own += [name for row in evaluations for name in row["episodes"] if name.startswith("episodes/metrics/")]
    assert len(set(own)) == 256
    assert all("episodes/metrics/asked" in row for row in metrics)
    assert [row["kind"] for row in read_metrics(run.events_path)].count("metrics_left_out") == 1
