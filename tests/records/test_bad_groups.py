"""Texts that a file cannot hold as they are: they are written out or refused, and end no writer."""

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import make_completion, make_group, make_item, same_groups, simple_group
from episode_groups import branched_episode, make_episode_group
from local_runs import Recorder, make_config
from report_runs import make_run, metrics_of, write_lines

from grpo_ray.config.task import EpisodesTaskConfig
from grpo_ray.records.rollout_log import read_groups, write_rollouts
from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.tasks.episode_examples import episode_examples
from grpo_ray.tasks.examples import Example, ExampleSets
from grpo_ray.tools.cli import main
from grpo_ray.types import ScoredGroup
from grpo_ray.watch.batch_metrics import ungraded_in
from grpo_ray.watch.run_log import MAX_OWN_NAMES, RunLog
from grpo_ray.watch.run_state import Ending, LiveStatus, RunState, read_state, reported

HALF = "\ud83d"  # of a surrogate pair


@pytest.mark.parametrize(
    "bad",
    [
        make_group(make_item(1), [make_completion([5], text=HALF)]),
        replace(make_group(make_item(1), [make_completion([5])]), errors={0: HALF}),
    ],
)
def test_half_a_pair_is_written_out(bad: ScoredGroup, tmp_path: Path) -> None:
    path = tmp_path / "rollouts.parquet"
    good = [simple_group(0), simple_group(2)]
    write_rollouts(path, 3, [good[0], bad, good[1]], [1, 2, 1])
    first, found, last = read_groups(path)
    assert same_groups([first, last], good)  # bit for bit
    assert r"\ud83d" in (found.rollout.completions[0].text, found.errors.get(0))


def test_all_episodes_that_fail_end_the_run_with_a_reward_too() -> None:
    failed = replace(branched_episode(reward=-1.0), status="environment_error", error="gone")
    group = make_episode_group(0, [failed, failed])
    assert group.errors == {}
    every = ungraded_in([group])
    some = ungraded_in([group, make_episode_group(1, [failed, branched_episode()])])
    assert every is not None
    assert (every.is_all, every.reason) == (True, "gone")
    assert some is not None
    assert (some.is_all, some.num_failed) == (False, 3)
    assert ungraded_in([simple_group(0)]) is None
    assert ungraded_in([]) is None


# ---- records of the driver ----


def test_names_of_metrics_are_bounded_and_the_run_says_so_once(tmp_path: Path) -> None:
    run, recorder = RunDirectory(tmp_path), Recorder()
    log = RunLog(run, recorder)
    for step in range(1, 9):
        own = {f"episodes/metrics/{step}/{n}": 1.0 for n in range(50)}
        log.line(step, log.bounded({"reward/mean": 0.5, "episodes/metrics/won": 1.0, **own}))
    log.close()
    rows = read_metrics(run.metrics_path)
    assert all({"reward/mean", "episodes/metrics/won"} <= row.keys() for row in rows)
    names = {name for row in rows for name in row}
    assert len(names) == MAX_OWN_NAMES + 2  # and the step, and the reward
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
    assert state is not None
    assert state.warnings == ("a warning with ?",)
    assert state.ending == Ending(kind="failed", text="no place ?")
    run.state_path.write_text(json.dumps({**state.model_dump(), "warnings": [HALF]}))
    assert (read_state(run) or state).warnings == ("?",)


@pytest.mark.slow
def test_any_failure_of_the_thread_of_the_state_is_said(tmp_path: Path) -> None:
    recorder, run, has_failed = Recorder(), RunDirectory(tmp_path), threading.Event()

    def fail_once() -> LiveStatus:
        if has_failed.is_set():
            return LiveStatus()
        has_failed.set()
        raise RuntimeError("dictionary changed size during iteration")

    with reported(run, 3, recorder) as reporter:
        reporter.follow(fail_once)
        assert has_failed.wait(60)
    reason = "dictionary changed size during iteration"
    assert recorder.warnings == [f"{run.state_path}: {reason}; `grpo-ray top` shows a stale state"]
    assert (read_state(run) or RunState).ending == Ending(kind="finished")


def test_a_report_shows_half_a_pair_escaped(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", make_config())
    write_lines(run.metrics_path, [{**metrics_of(1), f"episodes/metrics/{HALF}": 1.0}])
    with reported(run, 3, Recorder()) as reporter:
        reporter.warning(HALF)
    run.state_path.write_text(run.state_path.read_text().replace('"?"', json.dumps(HALF)))
    assert main(["report", str(run.path), "--log-ratio", "none"]) == 0
    page = (run.path / "report.html").read_text(encoding="utf-8")
    assert r"episodes/metrics/\ud83d" in page


# ---- examples ----


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
    monkeypatch.setattr("grpo_ray.tasks.episode_examples.import_function", lambda *_: make)
    task = EpisodesTaskConfig(kind="episodes", episode="my:episode", examples="my:examples")
    with pytest.raises(ValueError, match=message):
        episode_examples(task, 0)
