"""A group that a file cannot hold as it is: it is written otherwise and named, and ends no writer."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from builders import make_buffer, make_completion, make_group, make_item, parts, same_groups, simple_group
from episode_groups import branched_episode, make_episode_group
from local_runs import Recorder, make_config, train
from report_runs import make_run, metrics_of
from run_process import until

from grpo_ray.cluster.local import LocalActors
from grpo_ray.config.task import EpisodesTaskConfig
from grpo_ray.core.controller import Controller
from grpo_ray.records.rollout_log import read_groups, read_rollouts, write_rollouts
from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.tasks.dataset import episode_examples
from grpo_ray.tasks.examples import Example, ExampleSets
from grpo_ray.tools.cli import main
from grpo_ray.types import ScoredGroup
from grpo_ray.watch.batch_metrics import ungraded_in
from grpo_ray.watch.run_log import MAX_OWN_NAMES, RunLog
from grpo_ray.watch.run_state import Ending, LiveStatus, RunState, read_state, reported

HALF = "\ud83d"  # of a surrogate pair


class Unspeakable:
    def __str__(self) -> str:
        raise RuntimeError("no text")


def bad_group(group_id: int) -> ScoredGroup:
    """Make a group of episodes that has passed no check."""
    odd: dict[str, Any] = {
        "reward": torch.tensor(0.5),
        "turn_rewards": (torch.tensor(0.25), 10**400),
        "metrics": {7: 1.0, HALF: torch.tensor(2.0), "text": "text"},
        "error": f"there is no {HALF}",
    }
    episodes = [replace(branched_episode(), **odd), branched_episode(reward=1.0)]
    group = make_episode_group(group_id, [branched_episode(), episodes[1]])
    return replace(group, rollout=replace(group.rollout, completions=tuple(episodes)))


BAD: dict[str, Callable[[int], ScoredGroup]] = {
    "an episode": bad_group,
    "a truth": lambda g: make_group(replace(make_item(g), ground_truth=7), [make_completion([5])]),  # type: ignore[arg-type]
    "a prompt": lambda g: make_group(replace(make_item(g), prompt=Unspeakable()), [make_completion([5])]),  # type: ignore[arg-type]
    "a response": lambda g: make_group(make_item(g), [make_completion([5], text=HALF)]),
    "an error": lambda g: replace(make_group(make_item(g), [make_completion([5])]), errors={0: HALF}),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_group_is_written_with_escaped_texts(name: str, tmp_path: Path) -> None:
    path = tmp_path / "rollouts.parquet"
    good = [simple_group(0), simple_group(2)]
    note = write_rollouts(path, 3, [good[0], BAD[name](1), good[1]], [1, 2, 1])
    assert note.startswith(f"{path}: not written as they were: group 1 (")
    note.encode()
    first, found, last = read_groups(path)
    assert same_groups([first, last], good)  # bit for bit
    assert (found.group_id, len(found.rewards)) == (1, len(BAD[name](1).rewards))
    assert write_rollouts(path, 3, [found]) is None


def test_what_can_be_kept_of_an_episode_is_kept(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "rollouts.parquet", 1, [bad_group(0)])
    row = read_rollouts(tmp_path / "rollouts.parquet")[0]
    assert (row["episode_reward"], row["turn_rewards"]) == (0.5, None)
    assert row["episode_error"] == r"there is no \ud83d"
    assert dict(row["metrics"]) == {"7": 1.0, r"\ud83d": 2.0}


async def test_a_buffer_writes_its_rollouts_and_its_part_of_a_checkpoint(tmp_path: Path) -> None:
    buffer = make_buffer(tmp_path, size=1)
    for group_id in range(3):
        group = BAD["an error"](group_id) if group_id != 1 else simple_group(1)
        await buffer.put(*parts(group))
    await buffer.take(1, [0], (), 0)
    await buffer.capture(0)
    assert (await buffer.write_captured(tmp_path)).keys() == {"groups.parquet", "replay.parquet"}
    assert await buffer.flush() is None
    _, facts = await buffer.take(2, [1], (), 0)
    assert await buffer.flush() is None
    _, later = await buffer.take(3, [2], (), 0)
    assert later.notes == ()
    first, second = sorted(facts.notes)
    assert "groups.parquet: not written as they were: group 2 (" in first
    assert "step-000001.parquet: not written as they were: group 0 (" in second
    assert [group.group_id for group in read_groups(tmp_path / "groups.parquet")] == [1, 2]
    assert read_rollouts(tmp_path / "step-000001.parquet")[0]["error"] == r"\ud83d"


@pytest.mark.slow
@pytest.mark.usefixtures("model_cache")
def test_a_run_says_what_it_wrote_otherwise_and_goes_on(run: RunDirectory) -> None:
    """Give the buffer and the validation texts that no file can hold, behind all checks."""

    async def spoil(actors: LocalActors, controller: Controller) -> None:
        buffer = actors.buffer.actor
        put = buffer.put

        async def spoiled(rollout: Any, *others: Any) -> Any:
            rows = (replace(rollout.completions[0], text=HALF), *rollout.completions[1:])
            return await put(replace(rollout, completions=rows), *others)

        buffer.put = spoiled
        fetch = actors.fetch

        async def fetch_spoiled(reference: Any) -> Any:
            group = await fetch(reference)
            return replace(group, item=replace(group.item, ground_truth=7))

        actors.fetch = fetch_spoiled  # type: ignore[method-assign]
        await asyncio.Event().wait()

    recorder = train(make_config("algorithm.num_steps=4"), run.path, spoil)
    assert [row["step"] for row in read_metrics(run.metrics_path)] == [1, 2, 3, 4]
    said = [row["text"] for row in read_metrics(run.events_path) if row["kind"] == "rollouts_changed"]
    assert any("rollouts/step-000001.parquet: not written as they were" in text for text in said)
    assert any("evaluations/step-" in text and "not written as they were" in text for text in said)
    assert set(recorder.warnings) > {text for text in said if "evaluations" in text}
    assert (run.checkpoint_path(4) / "training" / "groups.parquet").exists()
    assert len(read_metrics(run.evaluations_summary_path)) == len(list(run.evaluations.glob("*.parquet"))) > 0


def test_all_episodes_that_fail_end_the_run_with_a_reward_too() -> None:
    failed = replace(branched_episode(reward=-1.0), status="environment_error", error="gone")
    group = make_episode_group(0, [failed, failed])
    assert group.errors == {}
    every = ungraded_in([group])
    some = ungraded_in([group, make_episode_group(1, [failed, branched_episode()])])
    assert (every.is_all, every.reason) == (True, "gone")
    assert (some.is_all, some.num_failed) == (False, 3)
    assert ungraded_in([simple_group(0)]) is None
    assert ungraded_in([]) is None


def test_names_of_metrics_are_bounded_and_the_run_says_so_once(tmp_path: Path) -> None:
    run, recorder = RunDirectory(tmp_path), Recorder()
    log = RunLog(run, recorder)
    for step in range(1, 9):
        own = {f"episodes/metrics/{step}/{n}": 1.0 for n in range(50)}
        log.line(step, log.bounded({"reward/mean": 0.5, "episodes/metrics/won": 1.0, **own}))
    log.close()
    rows = read_metrics(run.metrics_path)
    assert all({"reward/mean", "episodes/metrics/won"} <= row.keys() for row in rows)
    assert len({name for row in rows for name in row}) == MAX_OWN_NAMES + 2  # and the step, and the reward
    (event,) = read_metrics(run.events_path)
    assert event["kind"] == "metrics_left_out"
    assert "episodes/metrics/6/5 and all later ones are only in the rollouts" in event["text"]
    again = RunLog(run, recorder)  # of a resumed run
    assert "episodes/metrics/won" in again.bounded({"episodes/metrics/won": 1.0})
    again.close()


def test_a_state_with_half_a_pair_is_written_and_read(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)

    def fail() -> None:
        with reported(run, 3, Recorder()) as reporter:
            reporter.warning(f"a warning with {HALF}")
            raise ValueError(f"no place {HALF}")

    with pytest.raises(ValueError, match="no place"):
        fail()
    state = read_state(run)
    assert state.warnings == ("a warning with ?",)
    assert state.ending == Ending(kind="failed", text="no place ?")
    run.state_path.write_text(json.dumps({**state.model_dump(), "warnings": [HALF]}))
    assert (read_state(run) or state).warnings == ("?",)


@pytest.mark.slow
def test_any_failure_of_the_thread_of_the_state_is_said(tmp_path: Path) -> None:
    recorder, run, reason = Recorder(), RunDirectory(tmp_path), "dictionary changed size during iteration"
    fail_once = Mock(side_effect=chain([RuntimeError(reason)], repeat(LiveStatus())))
    with reported(run, 3, recorder) as reporter:
        reporter.follow(fail_once)
        until(lambda: fail_once.called)
    assert recorder.warnings == [f"{run.state_path}: {reason}; `grpo-ray top` shows a stale state"]
    assert (read_state(run) or RunState).ending == Ending(kind="finished")


def test_a_report_shows_half_a_pair_escaped(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", make_config())
    run.metrics_path.write_text(json.dumps({**metrics_of(1), f"episodes/metrics/{HALF}": 1.0}) + "\n")
    with reported(run, 3, Recorder()) as reporter:
        reporter.warning(HALF)
    run.state_path.write_text(run.state_path.read_text().replace('"?"', json.dumps(HALF)))
    assert main(["report", str(run.path), "--log-ratio", "none"]) == 0
    assert r"episodes/metrics/\ud83d" in (run.path / "report.html").read_text(encoding="utf-8")


def examples_with(**fields: Any) -> Callable[[int], ExampleSets]:
    good, bad = Example("question", "truth"), replace(Example("question", "truth"), **fields)
    return lambda seed: ExampleSets([good, bad], [good])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (examples_with(ground_truth=7), r"train\[1\] of my:examples: its ground_truth is 7; it must be text"),
        (examples_with(ground_truth=None), r"its ground_truth is None; it must be text"),
        (examples_with(question=["a"]), r"its question is \['a'\]; it must be text"),
        (examples_with(question=HALF), r"its question holds half of a surrogate pair"),
        (lambda seed: ExampleSets([Example("", "")], [("", "")]), r"validation\[0\] of my:examples is a tuple"),  # type: ignore[list-item]
    ],
)
def test_examples_that_are_no_text_are_refused(
    make: Callable[[int], ExampleSets], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_ray.tasks.dataset.import_function", lambda *_: make)
    task = EpisodesTaskConfig(kind="episodes", episode="my:episode", examples="my:examples")
    with pytest.raises(ValueError, match=message):
        episode_examples(task, 0)
