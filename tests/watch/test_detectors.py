"""Detectors of failures: each fires on its own failure, none on good runs, and a run warns once."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
from builders import check_names
from local_runs import make_config, train

from grpo_ray.config import Config
from grpo_ray.config.run import DetectorName
from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.watch.detectors import DETECTORS, NUM_CLEAR_STEPS, Detection, FailureWatch, detections

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests/recorded_runs"  # the watched metrics of real runs
SIZE = "algorithm.prompts_per_step=16", "algorithm.samples_per_prompt=8"
CONFIG = make_config(*SIZE)
NARROW = make_config(*SIZE, "algorithm.loss=gspo")
GOOD = {
    "reward/answer": 0.3, "reward/mean": 0.3, "reward/errors": 0.0, "reward/ungradable": 0.0,
    "rollout/response_tokens/mean": 16.0, "rollout/zero_variance_groups": 3.0, "policy/entropy": 0.09,
    "loss/untrained_frac": 0.0, "loss/gradient_scale": 1.0, "loss/clip_frac": 0.003,
    "mismatch/kl": 0.001, "mismatch/ess_frac": 0.99, "lag/mean": 1.0, "lag/max": 1.0, "optim/num_updates": 1.0,
}  # fmt: skip
FIRST = {"lag/mean": 0.0, "lag/max": 0.0}


def watched(
    rows: list[Mapping[str, Any]], silent: tuple[DetectorName, ...] = (), config: Config = CONFIG
) -> list[Detection]:
    watch = FailureWatch(config, silent)
    return [found for step, row in enumerate(rows, 1) for found in watch.step(step, row)]


def course(before: Mapping[str, Any], after: Mapping[str, Any], num_steps: int = 8) -> list[Mapping[str, Any]]:
    """Return good metrics with `before` in the first three steps and `after` in the others."""
    return [{**GOOD, **(before if step < 3 else after)} for step in range(num_steps)]


FAILURES: dict[DetectorName, tuple[list[Mapping[str, Any]], int]] = {  # with the step of the warning
    "short_outputs": (course({}, {"rollout/response_tokens/mean": 7.9, "reward/answer": 0.0}), 6),
    "wrong_mask": (course({}, {"loss/untrained_frac": 0.06}), 4),
    "mismatched_logprobs": (course({**FIRST, "mismatch/kl": 0.4}, {"mismatch/kl": 0.4}), 1),
    "wrong_normalizer": (course({}, {"loss/gradient_scale": 4.7}), 4),
    "stale_old_logprobs": (course({}, {"loss/clip_frac": 0.3}), 6),
    "satisfied_reward": (course({"reward/mean": 1.0, "rollout/zero_variance_groups": 16.0}, {}), 3),
    "entropy_collapse": (course({}, {"policy/entropy": 0.01}), 6),
    "large_lag": (course({}, {"lag/mean": 9.0, "mismatch/ess_frac": 0.3}), 6),
    "narrow_clip": (course({}, {"loss/clip_frac": 0.88}), 6),
    "reward_errors": (course({}, {"reward/errors": 1.0}), 4),
}


def config_of(name: str) -> Config:
    """Return the configuration in which a failure shows: `narrow_clip` is one of a narrow range."""
    return NARROW if name == "narrow_clip" else CONFIG


@pytest.mark.parametrize("name", get_args(DetectorName))
def test_a_detector_warns_once_of_its_failure_and_of_no_other(name: DetectorName) -> None:
    rows, step = FAILURES[name]
    (found,) = watched(rows, config=config_of(name))
    assert (found.name, found.step, found.kind) == (name, step, f"detected_{name}")
    assert found.text.endswith(f"; see docs/failures.md#{DETECTORS[name].anchor}")
    assert any(metric in found.text for metric in GOOD)
    assert watched(rows, silent=(name,), config=config_of(name)) == []


@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("short_outputs", {"rollout/response_tokens/mean": 7.9, "reward/answer": 0.6}),  # briefer, and better
        ("short_outputs", {"rollout/response_tokens/mean": 9.0, "reward/answer": 0.0}),
        ("wrong_mask", {"loss/untrained_frac": 0.01}),
        ("wrong_mask", {"loss/untrained_frac": 1.0, "optim/skipped_updates": 1.0}),
        ("wrong_normalizer", {"loss/gradient_scale": 0.0, "optim/skipped_updates": 1.0}),
        ("mismatched_logprobs", {"mismatch/kl": 0.4}),  # the weights differ
        ("wrong_normalizer", {"loss/gradient_scale": 0.6}),
        ("wrong_normalizer", {"loss/gradient_scale": 0.3, "loss/clip_frac": 0.5, "lag/mean": 1.2}),
        ("stale_old_logprobs", {"loss/clip_frac": 0.3, "optim/num_updates": 4.0}),
        ("stale_old_logprobs", {"loss/clip_frac": 0.3, "mismatch/ess_frac": 0.5}),
        ("satisfied_reward", {"reward/mean": 1.0, "rollout/zero_variance_groups": 16.0}),  # learned
        ("entropy_collapse", {"policy/entropy": 0.01, "reward/answer": 0.95}),
        ("large_lag", {"lag/mean": 9.0, "mismatch/ess_frac": 0.8}),
        ("narrow_clip", {"loss/clip_frac": 0.5}),
        ("reward_errors", {"reward/ungradable": 12.0}),  # of 128: a few answers are too much to grade
    ],
)
def test_what_looks_like_a_failure_and_is_none(name: DetectorName, after: Mapping[str, Any]) -> None:
    others = tuple(other for other in get_args(DetectorName) if other != name)
    assert watched(course({}, after), silent=others, config=config_of(name)) == []


def test_a_judges_reward_dropped_groups_and_late_episodes_are_none() -> None:
    never = {"reward/answer": 0.0}  # of a judge that gives less than 1
    learned = {"reward/mean": 0.75, "rollout/response_tokens/mean": 7.9, "policy/entropy": 0.01}
    assert watched(course({**never, "reward/mean": 0.2}, {**never, **learned})) == []
    equal = {"rollout/zero_variance_groups": 10.0}
    assert [found.name for found in watched(course({}, equal))] == ["entropy_collapse"]
    assert watched(course({}, equal | {"rollout/dropped_groups": 8.0})) == []  # 10 of 24
    late = {"episodes/status/finished": 0.98, "reward/errors": 2.0}
    assert watched(course({}, late)) == []
    (found,) = watched(course({}, late | {"reward/errors": 20.0}))
    assert "20 episodes ended without a reward" in found.text


def test_many_clipped_tokens_are_a_failure_unless_the_clip_range_is_narrow() -> None:
    rows = course({}, {"lag/mean": 9.0, "lag/max": 9.0, "loss/clip_frac": 0.2})
    assert [found.name for found in watched(rows)] == ["large_lag"]
    watch = FailureWatch(NARROW)
    for after in ({"lag/mean": 9.0, "loss/clip_frac": 0.2}, {"loss/clip_frac": 0.2}):
        assert not [found for row in course({}, after) for found in watch.step(1, row)]


def test_groups_that_come_to_hold_equal_wrong_responses_are_a_collapse() -> None:
    equal = {"rollout/zero_variance_groups": 11.0, "reward/answer": 0.02}
    assert [(found.name, found.step) for found in watched(course({}, equal))] == [("entropy_collapse", 6)]
    assert watched(course(equal, equal)) == []  # so from the start: the task is too hard
    assert watched(course({}, {**equal, "reward/answer": 0.9})) == []
    assert watched(course({}, {**equal, "policy/entropy": 0.1})) == []  # equal by chance


def test_the_text_tells_episodes_that_sample_nothing_and_a_reward_that_hangs_from_the_usual() -> None:
    (found,) = watched(course(*[{"rollout/response_tokens/mean": 0.0}] * 2))
    assert (found.name, found.step, "no token was sampled" in found.text) == ("short_outputs", 3, True)
    (found,) = watched(course({}, {"reward/ungradable": 13.0}))
    assert (found.name, found.step) == ("reward_errors", 4)
    assert "13 responses were too costly to grade (reward/ungradable)" in found.text


def test_missing_metrics_are_skipped() -> None:
    for metric in GOOD:
        for value in (None, float("nan")):  # a metric that is absent is looked up as None
            for rows, _ in FAILURES.values():
                watched([{**row, metric: value} for row in rows])
    assert watched([{}] * 10) == []
    assert watched([{**GOOD, "reward/errors": float("nan")}] * 4) == []  # and is not taken for errors


def test_a_failure_that_comes_back_is_reported_again_and_one_that_stays_is_not() -> None:
    wrong, good = {**GOOD, "loss/untrained_frac": 0.5}, GOOD
    assert len(watched([wrong] * 50)) == 1
    assert len(watched([wrong, *[good] * (NUM_CLEAR_STEPS - 1), wrong])) == 1
    again = watched([wrong, *[good] * NUM_CLEAR_STEPS, wrong])
    assert [found.step for found in again] == [1, NUM_CLEAR_STEPS + 2]


def test_a_resumed_watch_does_not_repeat_itself(tmp_path: Path) -> None:
    config, path = make_config(), tmp_path / "metrics.jsonl"
    rows, step = FAILURES["entropy_collapse"]
    lines = [json.dumps({"step": number, **row}) + "\n" for number, row in enumerate(rows, 1)]

    def names(num_lines: int) -> list[str]:
        path.write_text("".join([*lines[:num_lines], "{damaged\n"]))
        watch = FailureWatch.of_run(config, path)
        return [found.name for at in range(num_lines, 8) for found in watch.step(at + 1, rows[at])]

    assert names(step - 1) == ["entropy_collapse"]
    assert names(step) == []
    assert FailureWatch.of_run(config, tmp_path / "none").step(1, GOOD) == []
    config = make_config("run.silent_detectors=[entropy_collapse]")
    assert names(step - 1) == []


def recorded(kind: str) -> Iterator[Any]:
    for path in sorted((RECORDED / kind).glob("*.jsonl")):
        yield pytest.param(path, id=path.stem)


OWN = {
    "narrow-clip": "algorithm.loss=gspo",
    "cispo": "algorithm.loss=cispo",
    "replay": "buffer.replay.frac=0.5",
    "arithmetic": "algorithm.prompts_per_step=8",
}


@pytest.mark.parametrize("path", recorded("good"))
def test_no_warning_in_a_good_run(path: Path) -> None:
    own = [OWN[path.stem]] if path.stem in OWN else []
    assert detections(make_config("algorithm.prompts_per_step=16", *own), read_metrics(path)) == []


@pytest.mark.parametrize("path", recorded("failures"))
def test_the_recorded_failure_is_found(path: Path) -> None:
    expected = {"re-tokenized": "mismatched_logprobs", "prompt-satisfies-reward": "satisfied_reward"}
    name = expected.get(path.stem, path.stem.replace("-", "_"))
    own = [OWN[path.stem]] if path.stem in OWN else []
    found = detections(make_config("algorithm.prompts_per_step=16", *own), read_metrics(path))
    assert name in [each.name for each in found]


def test_the_page_has_a_section_for_each_detector_and_the_catalog_its_metrics() -> None:
    page = (ROOT / "docs/failures.md").read_text()
    headings = re.findall(r"^#+ (.+)$", page, re.M)
    anchors = {re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-")) for heading in headings}
    for name, detector in DETECTORS.items():
        assert detector.anchor in anchors, detector.anchor
        assert f"`{name}`" in page
    assert check_names(GOOD) == []
    assert set(DETECTORS) == set(get_args(DetectorName)) == set(FAILURES)


WRONG_MASK = "algorithm.loss=examples.broken.losses:mask_off_by_one"
# Random text earns different rewards.
VARIED = "task.reward=[{reward: brevity, arguments: {free: 0, span: 40}}]"


def events(run: RunDirectory) -> list[dict[str, Any]]:
    return [row for row in read_metrics(run.events_path) if "detected" in row["kind"]]


@pytest.mark.slow
def test_a_run_warns_on_the_console_and_in_its_events_and_once_when_resumed(run: RunDirectory) -> None:
    recorder = train(make_config(WRONG_MASK, VARIED, "algorithm.num_steps=2"), run.path)
    (event,) = events(run)
    assert event["kind"] == "detected_wrong_mask"
    assert "docs/failures.md#a-wrong-mask" in event["text"]
    assert [text for text in recorder.warnings if "a-wrong-mask" in text] == [event["text"]]
    line = read_metrics(run.metrics_path)[event["step"] - 1]
    assert line["loss/untrained_frac"] > 0.1  # one of at most six tokens

    assert train(make_config(WRONG_MASK, VARIED, "algorithm.num_steps=4"), run.path).steps == [3, 4]
    assert events(run) == [event]
