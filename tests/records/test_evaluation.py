"""Evaluation summaries of hand-made groups, and their estimates and intervals."""

import math
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import builders
import numpy as np
import pytest
from builders import check_names, make_completion, make_item

from grpo_ray.core.validation import MAX_UNWRITTEN, Validation
from grpo_ray.records.evaluation_summary import bootstrap_intervals, pass_at_k, powers_of_two, summarise_groups
from grpo_ray.records.readable_rollouts import readable_rollouts
from grpo_ray.records.rollout_log import read_rollouts
from grpo_ray.records.run_files import read_metrics, step_name
from grpo_ray.types import ScoredGroup


def make_group(group_id: int, formats: list[float], answers: list[float], num_tokens: int = 3) -> ScoredGroup:
    ends = ["stop" if has_format else "length" for has_format in formats]
    completions = [
        make_completion([0] * num_tokens, None, 40, f"response {group_id}.{sample}", end)
        for sample, end in enumerate(ends)
    ]
    group = builders.make_group(make_item(group_id, truth=f"truth {group_id}"), completions, answers)
    return replace(group, format_rewards=np.array(formats, np.float32))


GROUPS = [
    make_group(0, [1, 1], [1, 1], num_tokens=5),
    make_group(1, [1, 0], [0, 0], num_tokens=3),
    make_group(2, [1, 1], [1, 0], num_tokens=4),
]


def test_summary() -> None:
    summary = summarise_groups(40, GROUPS)
    assert (summary.step, summary.version, summary.num_examples) == (40, 40, 3)
    assert summary.reward == summary.answer_reward == pytest.approx(3 / 6)
    assert summary.format_reward == pytest.approx(5 / 6)
    assert (summary.num_correct, summary.num_wrong_answer, summary.num_no_format) == (3, 2, 1)
    assert summary.mean_response_tokens == pytest.approx(4)
    assert summary.truncated_frac == pytest.approx(1 / 6)
    # the prompts' means are 1, 0 and 1/2: their standard deviation is 1/2
    assert summary.reward_standard_error == pytest.approx(0.5 / math.sqrt(3))
    assert summarise_groups(40, GROUPS[:1]).reward_standard_error == 0
    assert check_names(summary.metrics) == []


def test_what_could_not_be_graded_has_the_least_reward_of_its_own_part() -> None:
    groups = []
    for number, (part, rewards) in enumerate({"a": [-10.0, -10.0], "b": [1.0, 0.0]}.items()):
        group = make_group(number, [1, 1], rewards)
        item = replace(group.rollout.item, task=part)
        groups.append(replace(group, rollout=replace(group.rollout, item=item)))
    groups[1].errors[1] = "no answer in time"
    summary = summarise_groups(0, groups)
    assert summary.reward_by_task == {"a": -10.0, "b": 0.5}
    assert summary.reward == -4.75


def test_readable_rollouts_do_not_depend_on_the_order() -> None:
    chosen = readable_rollouts(GROUPS, 2)
    assert [(*r.values(),) for r in chosen] == [
        ("prompt 0", "response 0.0", "truth 0", 1.0, None),
        ("prompt 1", "response 1.0", "truth 1", 0.0, None),
    ]
    assert readable_rollouts(GROUPS[::-1], 2) == chosen
    assert len(readable_rollouts(GROUPS, 99)) == 3
    assert readable_rollouts(GROUPS, 0) == readable_rollouts([], 5) == []


def test_a_full_disk_fills_no_memory_with_evaluations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The responses of the oldest are given up; every evaluation keeps its metrics."""
    warnings, lost = list[str | None](), list[int]()
    log = SimpleNamespace(
        step=0,
        run=SimpleNamespace(evaluations=tmp_path),
        writer=SimpleNamespace(submit=lambda topic, write: write()),
        warning=lambda topic, text: warnings.append(text),
        event=lambda *_, validation_step: lost.append(validation_step),
    )
    context: Any = SimpleNamespace(config=None, actors=None, log=log, clock=None)
    evaluations: Any = Validation(context, [], None)  # type: ignore[arg-type]
    steps = range(1, MAX_UNWRITTEN + 4)

    full = Mock(side_effect=OSError("no space left on device"))
    with monkeypatch.context() as disk:
        disk.setattr("grpo_ray.core.validation.write_evaluation", full)
        for step in steps:
            evaluations._unwritten.append((summarise_groups(step, GROUPS), GROUPS))
            evaluations.write()
    assert [bool(groups) for _, groups in evaluations._unwritten] == [False] * 3 + [True] * MAX_UNWRITTEN
    assert warnings[-1] == f"{len(steps)} evaluations could not be written yet: no space left on device"
    evaluations.write()
    assert warnings[-1] is None
    assert [row["step"] for row in read_metrics(tmp_path / "summary.jsonl")] == list(steps)
    files = sorted(tmp_path.glob("*.parquet"))
    assert [file.stem for file in files] == [step_name(step) for step in steps[3:]]
    assert all(len(read_rollouts(file)) == sum(len(group.rewards) for group in GROUPS) for file in files)
    assert lost == [1, 2, 3]


@pytest.mark.parametrize("n", [1, 3, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_response(n: int) -> None:
    for k in range(1, n + 1):
        subsets = list(combinations(range(n), k))
        expected = [
            Fraction(sum(any(sample < c for sample in subset) for subset in subsets), len(subsets))
            for c in range(n + 1)
        ]
        estimates = pass_at_k(n, np.arange(n + 1), k)
        assert estimates == pytest.approx([float(share) for share in expected], abs=1e-12)


def test_pass_at_k_of_many_samples_does_not_overflow() -> None:
    # C(10000, 100) has 242 digits: not an exact float64, and near the end of its range.
    assert pass_at_k(10_000, np.array([0, 1, 9_950]), 100) == pytest.approx([0.0, 100 / 10_000, 1.0])
    assert pass_at_k(100_000, np.array([50_000]), 50_000)[0] == 1.0


@pytest.mark.parametrize(("n", "ks"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_powers_of_two(n: int, ks: list[int]) -> None:
    assert powers_of_two(n) == ks


def test_intervals_of_two_prompts() -> None:
    """The resampled mean is 0, 1/2 or 1 with probability 1/4, 1/2 and 1/4; equal prompts have no width."""
    values = np.array([[0.0, 0.7], [1.0, 0.7]])
    assert bootstrap_intervals(values) == pytest.approx(np.array([[0.0, 1.0], [0.7, 0.7]]))
    values = np.random.default_rng(3).random((50, 2))
    assert np.array_equal(bootstrap_intervals(values), bootstrap_intervals(values))  # the same draws each time


@pytest.mark.slow
def test_intervals_cover_the_true_mean_95_percent_of_the_time() -> None:
    rng = np.random.default_rng(1)
    draws = rng.random((150, 400)) < 0.3  # 400 evaluations of 150 prompts, as statistics of one call
    intervals = bootstrap_intervals(draws.astype(float))
    covered = ((intervals[:, 0] <= 0.3) & (intervals[:, 1] >= 0.3)).mean()
    assert 0.92 <= covered <= 0.98
    # About as wide as the normal interval.
    assert (intervals[:, 1] - intervals[:, 0]).mean() == pytest.approx(2 * 1.96 * np.sqrt(0.21 / 150), rel=0.05)
