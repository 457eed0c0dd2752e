"""Checks of all that an episode returns or raises: it can cost that episode, and nothing else."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from episode_groups import make_episode_group
from episode_players import TOOL, play, said, session_of, tokenizer_of
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from local_runs import train

from grpo_ray.config.episodes import EpisodesConfig
from grpo_ray.config.loading import load_config
from grpo_ray.episodes.outcome import Outcome, Status
from grpo_ray.episodes.session import Session
from grpo_ray.episodes.tool_calls import checked
from grpo_ray.records.rollout_log import read_rollouts, write_rollouts
from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.tasks.examples import Example, ExampleSets
from grpo_ray.tools.audit.audit import audit
from grpo_ray.types import Episode
from grpo_ray.watch.batch_metrics import rollout_metrics

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


def raises(error: BaseException) -> Callable[[], NoReturn]:
    def end() -> NoReturn:
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
        ("an exit", "the episode called exit(3)"),
        ("Ctrl-C", "the episode raised KeyboardInterrupt"),
    ):
        assert message in ended(ENDINGS[name]).error
    assert Outcome(1.0, metrics={HALF: 1}).metrics == {r"\ud83d": 1.0}
    with pytest.raises(ValueError, match=r"returned 0\.5 as turn_rewards; list a number per turn"):
        Outcome(1.0, 0.5)  # type: ignore[arg-type]


def test_an_error_earns_what_the_configuration_says(tmp_path: Path) -> None:
    fails = ENDINGS["half a pair in an error"]
    result = ended(fails, EpisodesConfig(max_tokens=5000, error_reward=-0.5))
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
    for error in (TypeError("a"), KeyError("b"), AttributeError("c"), RecursionError("d"), IndexError("e")):

        def broken(*_: Any, error: Exception = error) -> Any:
            raise error

        with pytest.raises(ValueError, match=type(error).__name__):
            checked(broken)([], [], [])


TEXTS = st.text(st.characters(exclude_categories=()), max_size=8)  # lone surrogates, too
WHOLE = st.integers() | st.integers(-(10**400), 10**400)
NUMBERS = st.floats() | WHOLE | st.booleans() | st.none() | TEXTS | st.binary(max_size=3)
METRICS = st.dictionaries(st.one_of(TEXTS, st.integers(), st.just("x" * 101)), NUMBERS, max_size=4)
TURNS = st.none() | st.lists(NUMBERS, max_size=2)
OUTCOMES = st.builds(lambda *fields: lambda: Outcome(*fields), NUMBERS, TURNS, METRICS)
KINDS = st.sampled_from([ValueError, KeyError, OSError, Base, SystemExit, SyntaxError, StopIteration])
NOTES = st.lists(TEXTS, max_size=2)
ERRORS = st.builds(lambda kind, text, own: raises(noted(kind(text), own)), KINDS, TEXTS, NOTES)
FUZZED = st.one_of(OUTCOMES, ERRORS, NUMBERS.map(lambda number: lambda: number))


def noted(error: BaseException, notes: Sequence[str]) -> BaseException:
    for note in notes:
        error.add_note(note)
    return error


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.floats(), st.integers(), TEXTS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


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


played: Counter[str] = Counter()


async def one_bad_ending(session: Session, example: Example) -> Any:
    """Take a turn; the first episode of each training group ends as its example says, the others well."""
    reply = await session.chat([{"role": "user", "content": example.question}])
    played[example.ground_truth] += 1
    if example.ground_truth in ENDINGS and played[example.ground_truth] == 1:
        return ENDINGS[example.ground_truth]()
    return float(sum(reply.text.encode()) % 2)


def examples(seed: int) -> ExampleSets:
    found = [Example(f"Say a number above {n}.", name) for n, name in enumerate(ENDINGS)]
    return ExampleSets(found, [Example(f"Say a number above {n}.", "good") for n in range(90, 92)])


async def odd_names(session: Session, example: Example) -> Outcome:
    """Return the largest rewards, and in each episode 50 names of metrics that no other has."""
    reply = await session.chat([{"role": "user", "content": example.question}])
    sign = 2 * (sum(reply.text.encode()) % 2) - 1
    played["names"] += 50
    names = [f"n{n}" for n in range(played["names"], played["names"] + 50)]
    return Outcome(sign * 1e12, metrics={"asked": 1.0, **dict.fromkeys(names, 1.0)})


def run_of(folder: Path, episode: str, *overrides: str) -> RunDirectory:
    names = [f"task.episode={__name__}:{episode}", f"task.examples={__name__}:examples"]
    warmup = "task.warmup=small_episodes:warmup_pairs"
    config = load_config(Path(__file__).parents[1] / "small_episodes.yaml", [*names, warmup, *overrides])
    played.clear()
    train(config, folder)
    return RunDirectory(folder)


@pytest.mark.slow
@pytest.mark.usefixtures("model_cache")
def test_a_run_loses_only_the_episodes_that_end_badly(tmp_path: Path) -> None:
    sizes = ["algorithm.num_steps=4", f"algorithm.prompts_per_step={len(ENDINGS) // 4}"]
    run = run_of(tmp_path / "run", "one_bad_ending", *sizes)
    assert [row["step"] for row in read_metrics(run.metrics_path)] == [1, 2, 3, 4]
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


@pytest.mark.slow
@pytest.mark.usefixtures("model_cache")
def test_a_run_bounds_the_names_of_metrics_and_trains_on_the_largest_rewards(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", "odd_names", "algorithm.num_steps=3", "algorithm.advantage=mean")
    rows = read_metrics(run.metrics_path)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["optim/skipped_updates"] for row in rows] == [0, 0, 0]
    assert any(row["optim/grad_norm"] > 1e6 for row in rows)
    evaluations = read_metrics(run.evaluations_summary_path)
    own = [name for row in rows for name in row if "episodes/metrics/" in name and not name.startswith("eval/")]
    own += [name for row in evaluations for name in row["episodes"] if name.startswith("episodes/metrics/")]
    assert len(set(own)) == 256
    assert all("episodes/metrics/asked" in row for row in rows)
    assert [row["kind"] for row in read_metrics(run.events_path)].count("metrics_left_out") == 1
