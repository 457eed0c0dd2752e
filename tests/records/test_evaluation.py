"""Evaluation summaries of hand-made groups."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import builders
import numpy as np
import pytest
from builders import make_completion, make_item

from grpo_ray.core.validation import MAX_UNWRITTEN, Validation
from grpo_ray.records.readable_rollouts import readable_rollouts
from grpo_ray.records.rollout_log import read_rollouts
from grpo_ray.records.run_files import read_metrics, step_name
from grpo_ray.records.validation_files import summarise_groups, write_evaluation
from grpo_ray.types import ScoredGroup
from grpo_ray.watch.metrics_catalog import check_names


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
    assert check_names(summary.metrics) == []


def test_write_evaluation(tmp_path: Path) -> None:
    for step in (0, 40):
        write_evaluation(tmp_path, summarise_groups(step, GROUPS), GROUPS)
    assert [row["response"] for row in read_rollouts(tmp_path / "step-000040.parquet")][:2] == [
        "response 0.0",
        "response 0.1",
    ]
    rows = read_metrics(tmp_path / "summary.jsonl")
    assert [row["step"] for row in rows] == [0, 40]
    assert rows[1]["reward"] == 0.5


def test_readable_rollouts_do_not_depend_on_the_order() -> None:
    chosen = readable_rollouts(GROUPS, 2)
    assert [(r.prompt, r.response, r.ground_truth, r.reward) for r in chosen] == [
        ("prompt 0", "response 0.0", "truth 0", 1.0),
        ("prompt 1", "response 1.0", "truth 1", 0.0),
    ]
    assert readable_rollouts(GROUPS[::-1], 2) == chosen
    assert len(readable_rollouts(GROUPS, 99)) == 3
    assert readable_rollouts(GROUPS, 0) == readable_rollouts([], 5) == []


def test_a_full_disk_fills_no_memory_with_evaluations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The responses of the oldest are given up; every evaluation keeps its metrics."""
    warnings: list[str | None] = []
    log = SimpleNamespace(
        step=0,
        run=SimpleNamespace(evaluations=tmp_path),
        writer=SimpleNamespace(submit=lambda topic, write: write()),
        warning=lambda topic, text: warnings.append(text),
    )
    context: Any = SimpleNamespace(config=None, actors=None, log=log, clock=None)
    evaluations: Any = Validation(context, [], None)  # type: ignore[arg-type]
    steps = range(1, MAX_UNWRITTEN + 4)

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as disk:
        disk.setattr("grpo_ray.core.validation.write_evaluation", full)
        for step in steps:
            evaluations._unwritten.append((summarise_groups(step, GROUPS), GROUPS))
            evaluations.write()
    assert [bool(groups) for _, groups in evaluations._unwritten] == [False] * 3 + [True] * MAX_UNWRITTEN
    assert warnings[-1] == f"{len(steps)} evaluations could not be written yet: no space left on device"
    evaluations.write()
    assert warnings[-1] is None
    summaries = (tmp_path / "summary.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in summaries] == list(steps)
    num_rows = [len(read_rollouts(tmp_path / f"{step_name(step)}.parquet")) for step in steps]
    assert num_rows == [0] * 3 + [sum(len(group.rewards) for group in GROUPS)] * MAX_UNWRITTEN
