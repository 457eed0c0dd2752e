"""Run folders, the metrics file, the rollout log and the metrics catalogue."""

import json
import math
import time
from pathlib import Path

import numpy as np
import pytest

from grpo_ray.config import Config
from grpo_ray.config_loading import load_config
from grpo_ray.telemetry.metrics_catalog import METRICS, check_names
from grpo_ray.telemetry.rollout_log import read_rollouts, write_rollouts
from grpo_ray.telemetry.run_files import MetricsLog, RunDirectory, read_metrics
from grpo_ray.types import Completion, PromptItem, RolloutGroup, ScoredGroup

CONFIG = Config.model_validate({"model": {"path": "m"}, "task": {"kind": "sorting"}})


def make_group(group_id: int, versions: list[list[int]]) -> ScoredGroup:
    completions = tuple(
        Completion(
            text=f"response {group_id}.{sample}",
            token_ids=np.arange(len(row), dtype=np.int32) + 100,
            logprobs=-np.arange(len(row), dtype=np.float32),
            versions=np.array(row, dtype=np.int32),
            finish_reason="length" if sample else "stop",
        )
        for sample, row in enumerate(versions)
    )
    item = PromptItem(group_id, f"prompt {group_id}", (1, 2), f"truth {group_id}")
    ones = np.ones(len(versions), dtype=np.float32)
    advantages = np.linspace(-1, 1, len(versions), dtype=np.float32)
    return ScoredGroup(RolloutGroup(item, completions, "generator-0"), 0.5 * ones, ones, 0 * ones, advantages)


# ---- run folders ----


def test_create_makes_the_folders_and_the_config(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "runs" / "first")
    run.create(CONFIG)
    assert all(folder.is_dir() for folder in (run.rollouts, run.evaluations, run.checkpoints, run.logs))
    assert load_config(run.config_path) == CONFIG
    assert run.rollouts_path(40) == run.path / "rollouts" / "step-000040.parquet"
    assert run.checkpoint_path(40) == run.path / "checkpoints" / "step-000040"


def test_create_refuses_a_used_folder(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    RunDirectory(tmp_path / "empty").create(CONFIG)
    with pytest.raises(ValueError, match=r"empty exists already and is not empty.*give another run.name"):
        RunDirectory(tmp_path / "empty").create(CONFIG)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match=r"is a file"):
        RunDirectory(tmp_path / "file").check_free()


# ---- metrics ----


def test_metrics_are_readable_after_every_line(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    metrics = {
        "reward/mean": np.float32(0.5),
        "loss/policy": math.nan,
        "optim/grad_norm": math.inf,
        "lag/max": 2,
    }
    log.append(1, metrics)
    expected = {"step": 1, "reward/mean": 0.5, "loss/policy": None, "optim/grad_norm": None, "lag/max": 2}
    assert read_metrics(tmp_path / "metrics.jsonl") == [expected]
    log.append(2, {})
    assert read_metrics(tmp_path / "metrics.jsonl") == [expected, {"step": 2}]


def test_half_written_line_is_left_out_and_dropped_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "reward/me')
    assert read_metrics(path) == [{"step": 1}]
    MetricsLog(path).append(2, {"lag/max": 0.0})
    assert read_metrics(path) == [{"step": 1}, {"step": 2, "lag/max": 0.0}]
    path.write_text('{"step": 1\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"line 1: not valid JSON"):
        read_metrics(path)


# ---- rollouts ----


def test_rollouts_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "step-000007.parquet"
    write_rollouts(path, 7, [make_group(3, [[1, 1, 2], [2]]), make_group(4, [[], [0, 0]])])
    rows = read_rollouts(path)
    assert [(row["group_id"], row["sample"], row["num_tokens"]) for row in rows] == [
        (3, 0, 3),
        (3, 1, 1),
        (4, 0, 0),
        (4, 1, 2),
    ]
    assert rows[0] == {
        "step": 7,
        "group_id": 3,
        "sample": 0,
        "prompt": "prompt 3",
        "response": "response 3.0",
        "ground_truth": "truth 3",
        "reward": 0.5,
        "format_reward": 1.0,
        "answer_reward": 0.0,
        "advantage": -1.0,
        "num_tokens": 3,
        "finish_reason": "stop",
        "min_version": 1,
        "max_version": 2,
        "generator": "generator-0",
        "token_ids": [100, 101, 102],
        "logprobs": [0.0, -1.0, -2.0],
        "versions": [{"version": 1, "start": 0, "end": 2}, {"version": 2, "start": 2, "end": 3}],
    }
    assert (rows[2]["min_version"], rows[2]["token_ids"], rows[2]["versions"]) == (None, [], [])
    assert [file.name for file in tmp_path.iterdir()] == [path.name]  # no partial file stays
    write_rollouts(path, 8, [])
    assert read_rollouts(path) == []


def test_rollouts_are_quick_to_write(tmp_path: Path) -> None:
    groups = [make_group(group_id, [[1] * 32 + [2] * 32] * 8) for group_id in range(32)]
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        write_rollouts(tmp_path / "x.parquet", 0, groups)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.015


# ---- the catalogue ----


def test_catalogue_knows_its_names() -> None:
    assert check_names([*METRICS, "memory/learner_bytes"]) == []
    assert check_names({"reward/mean": 1.0, "reward/men": 1.0, "x": 0.0}) == ["reward/men", "x"]
    assert all(meaning for _, meaning in METRICS.values())
    json.dumps(METRICS)
