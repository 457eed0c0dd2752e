"""Reward functions that fail: said in the first step, and the end of a run if every answer fails."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import broken_rewards
import pytest
from broken_rewards import FAULTS
from builders import changed, make_completion, make_group, make_item
from local_runs import make_config, train, until

from grpo_ray.cluster.local import LocalActors
from grpo_ray.core.controller import Controller
from grpo_ray.errors import RunError
from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.types import ScoredGroup
from grpo_ray.watch.batch_metrics import ungraded_in

SAID = {
    "nan": "ValueError: task.reward: broken_rewards:{} returned nan as 'reward'",
    "none": "ValueError: task.reward: broken_rewards:{} returned None as 'reward'",
    "raises": "KeyError: 'boom' (broken_rewards.py:",
    "hangs": "longer than 0.2 s (scorer.timeout_s)",
    "writes": "the grader's sandbox forbids writing files",
}
TRACEBACK = {"raises": '{"no": "reward"}["boom"]', "writes": '.write_text("x")'}


def said_of(function: str, fault: str) -> str:
    line = getattr(broken_rewards, function).__code__.co_firstlineno
    return SAID[fault].format(f"{function} (broken_rewards.py:{line})")


def broken(function: str, fault: str, *overrides: str) -> Any:
    own = f"{{reward: 'broken_rewards:{function}', arguments: {{fault: {fault}}}}}"
    scorer = "scorer={num_workers: 2, timeout_s: 0.2}"
    return make_config(f"task.reward=[{{reward: exact_match}}, {own}]", scorer, *overrides)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.kept("hangs")
def test_a_reward_that_always_fails_ends_the_run_at_its_first_validation(fault: str, tmp_path: Path) -> None:
    with pytest.raises(RunError) as ending:
        train(broken("always", fault), tmp_path / "run")
    text = str(ending.value)
    assert "task.reward: none of the 4 answers in the validation at step 0 could be graded" in text
    assert said_of("always", fault) in text
    assert TRACEBACK.get(fault, "") in text  # the function's own
    assert "\non the response '" in text
    assert not read_metrics(tmp_path / "run" / "metrics.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["raises", "hangs"])
@pytest.mark.kept("raises")
def test_a_reward_that_sometimes_fails_is_said_once_in_the_first_step(fault: str, run: RunDirectory) -> None:
    sizes = ["algorithm.num_steps=2", "algorithm.prompts_per_step=8"]
    recorder = train(broken("sometimes", fault, *sizes), run.path)
    assert recorder.steps == [1, 2]
    (said,) = [text for text in recorder.warnings if "a-reward-that-fails" in text]
    assert said.startswith("step 1: ")
    row = read_metrics(run.metrics_path)[0]
    assert f"{row['reward/ungradable' if fault == 'hangs' else 'reward/errors']:.0f} responses" in said
    assert said_of("sometimes", fault) in said
    assert "\non the response '" in said
    assert [
        event["text"] for event in read_metrics(run.events_path) if event["kind"] == "detected_reward_errors"
    ] == [said]


@pytest.mark.slow
@pytest.mark.parametrize(
    "others",
    [(), ("algorithm.oversample_frac=0.5",), ("buffer.replay.frac=0.5", "algorithm.dynamic_sampling_tries=2")],
    ids=["plain", "oversampled", "replayed-and-dropped"],
)
@pytest.mark.kept("plain")
def test_a_later_batch_without_a_grade_ends_the_run_with_a_checkpoint_to_resume(
    others: tuple[str, ...], tmp_path: Path, run: RunDirectory
) -> None:
    away = tmp_path / "away"
    reward = f"{{reward: 'broken_rewards:while_there_is', arguments: {{path: '{away}'}}}}"
    config = make_config(f"task.reward=[{reward}]", "scorer.num_workers=2", "algorithm.num_steps=40", *others)

    async def leave(actors: LocalActors, controller: Controller) -> None:
        await until(lambda: controller.version >= 2)
        away.touch()
        await asyncio.Event().wait()

    with pytest.raises(RunError, match=r"none of the \d+ answers of step \d+ could be graded") as ending:
        train(config, run.path, leave)
    assert "ConnectionError: the judge is away (broken_rewards.py:" in str(ending.value)
    assert 'raise ConnectionError("the judge is away")' in str(ending.value)
    checkpoint = max(int(path.name.removeprefix("step-")) for path in run.checkpoints.iterdir())
    assert checkpoint >= 2

    away.unlink()
    shorter = changed(config, algorithm={"num_steps": checkpoint + 2})
    assert train(shorter, run.path).steps == [checkpoint + 1, checkpoint + 2]
    assert [row["step"] for row in read_metrics(run.metrics_path)] == list(range(1, checkpoint + 3))


def failed_group(**reasons: Any) -> ScoredGroup:
    completions = [make_completion([5, 6], text=f"answer {sample}\x1b") for sample in range(2)]
    return replace(make_group(make_item(0), completions), **reasons)


def test_an_answer_that_the_reward_calls_ungradable_is_graded_and_one_that_ends_its_grading_is_not() -> None:
    assert ungraded_in([failed_group()]) is None
    judged = failed_group(ungradable={0: "too long", 1: "too long"})
    assert ungraded_in([judged]) is None
    hung = failed_group(ungradable={0: "longer than 5 s", 1: "longer than 5 s"}, overruns=frozenset({0, 1}))
    assert ungraded_in([hung]).is_all
    found = ungraded_in([judged, hung])
    assert not found.is_all
    assert (found.num_failed, found.num_answers, found.reason) == (2, 4, "longer than 5 s")
    assert "\x1b" not in found.example
    found = ungraded_in([failed_group(errors={1: "boom"})])
    assert (found.reason, found.response, found.is_all) == ("boom", "answer 1\x1b", False)
