"""Run directories, the metrics file and its lines by step, the rollout log and the metrics catalog."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import builders
import numpy as np
import pyarrow as pa
import pytest
from builders import check_names, file_size_limit, make_completion, make_item, same_groups
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_ray.config import Config
from grpo_ray.config.loading import load_config
from grpo_ray.errors import RunError
from grpo_ray.records.episode_columns import _list_array
from grpo_ray.records.json_lines import STEP, JsonLines, StepLines, read_lines
from grpo_ray.records.rollout_log import log_table, read_groups, read_rollouts, read_uses, write_rollouts
from grpo_ray.records.run_files import RunDirectory, last_logged_step, read_metrics, step_name
from grpo_ray.types import Completion, PromptItem, RolloutGroup, ScoredGroup
from grpo_ray.watch.metrics_catalog import METRICS

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)  # a lone surrogate is not valid text

CONFIG = Config.model_validate({"model": {"path": "m"}, "task": {"kind": "sorting"}})


def make_group(group_id: int, versions: list[list[int]]) -> ScoredGroup:
    completions = [
        make_completion(
            range(100, 100 + len(row)), [-float(n) for n in range(len(row))], row,
            f"response {group_id}.{sample}", "length" if sample else "stop",
        )
        for sample, row in enumerate(versions)
    ]  # fmt: skip
    item, advantages = make_item(group_id, truth=f"truth {group_id}"), np.linspace(-1, 1, len(versions))
    return builders.make_group(item, completions, [0.5] * len(versions), list(advantages))


def test_create_makes_the_folders_and_the_config_also_after_it_was_interrupted(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "runs" / "first")
    run.rollouts.mkdir(parents=True)
    (run.path / ".config.yaml.partial").touch()
    run.create(CONFIG)
    assert all(folder.is_dir() for folder in (run.rollouts, run.evaluations, run.checkpoints, run.logs))
    assert load_config(run.config_path) == CONFIG
    assert run.rollouts_path(40) == run.path / "rollouts" / "step-000040.parquet"
    assert (run.skipped, run.events_path) == (run.path / "skipped", run.path / "events.jsonl")
    assert run.checkpoint_path(40) == run.path / "checkpoints" / "step-000040"


def test_create_refuses_a_used_folder(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    RunDirectory(tmp_path / "empty").create(CONFIG)
    with pytest.raises(ValueError, match=rf"empty exists already.*`grpo-ray resume {tmp_path}/empty`, give"):
        RunDirectory(tmp_path / "empty").create(CONFIG)
    (tmp_path / "other" / "logs" / "learner.log").mkdir(parents=True)
    with pytest.raises(ValueError, match="is not empty"):
        RunDirectory(tmp_path / "other").create(CONFIG)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match=r"is a file"):
        RunDirectory(tmp_path / "file").check_free()
    with pytest.raises(RunError, match=r"/proc/run cannot be written .*; give another run.name or run.output"):
        RunDirectory("/proc/run").check_free()
    with pytest.raises(ValueError, match="is not UTF-8, which rollouts need"):
        RunDirectory(os.fsdecode(b"/tmp/\xe4")).check_free()


def test_rewind_deletes_only_later_steps(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.rewind(0)
    assert os.listdir(tmp_path) == []  # of a run that wrote nothing
    run.create(CONFIG)
    run.skipped.mkdir()
    early = '{"step": 1,  "x": 0.10}\n{"step": 2}\n'  # its bytes must not change
    run.metrics_path.write_text(early + '{"step": 3}\n{"step": 4, "rew')
    run.evaluations_summary_path.write_text('{"step": 0}\n{"step": 4}\n')
    run.events_path.write_text('{"step": 9}\n')
    for folder in (run.rollouts, run.evaluations, run.skipped):
        for step in (0, 2, 3, 1_000_000):
            (folder / f"{step_name(step)}.parquet").touch()
        (folder / ".step-000002.parquet.partial").touch()
        (folder / "notes.txt").touch()
    checkpoint = run.checkpoint_path(3)
    checkpoint.mkdir()
    run.rewind(2)
    assert run.metrics_path.read_text() == early
    assert run.evaluations_summary_path.read_text() == '{"step": 0}\n'
    assert run.events_path.read_text() == '{"step": 9}\n'  # events are never rewound
    for folder in (run.rollouts, run.skipped):
        assert sorted(os.listdir(folder)) == ["notes.txt", "step-000000.parquet", "step-000002.parquet"]
    assert len(os.listdir(run.evaluations)) == 4
    assert checkpoint.is_dir()
    before = run.metrics_path.stat().st_ino
    run.rewind(2)
    assert run.metrics_path.stat().st_ino == before  # nothing to do, nothing written


HOLD_LOCK = """
import os, subprocess, sys, time
from grpo_ray.records.run_files import RunDirectory
with RunDirectory(sys.argv[1]).lock():
    is_forked, tell = os.pipe()
    children = [subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, close_fds=False).pid, os.fork()]
    if not children[1]:
        os.write(tell, b"x")
        time.sleep(60)
    os.read(is_forked, 1)  # the child has closed its copy of the lock
    print(os.getpid(), *children, flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
def test_lock_lasts_as_long_as_its_process_and_no_longer(run: RunDirectory) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD_LOCK, run.path], stdout=subprocess.PIPE, text=True)
    pid, *children = map(int, holder.stdout.readline().split())
    try:
        message = rf"another process \(pid {pid} on host {socket.gethostname()}\) writes to {run.path}"
        with pytest.raises(RunError, match=message), run.lock():
            pass
        os.kill(pid, signal.SIGKILL)
        holder.wait(30)
        for child in children:
            os.kill(child, 0)  # they are alive, without the lock
        with run.lock():
            assert json.loads((run.path / ".lock").read_text())["pid"] == os.getpid()
            with pytest.raises(RunError, match=rf"pid {os.getpid()} on host"), run.lock():
                pass
    finally:
        holder.stdout.close()
        for child in children:
            os.kill(child, signal.SIGKILL)
    with run.lock():
        run.create(CONFIG)  # a folder with nothing but the lock is free


def test_lines_are_readable_after_each_and_hold_what_json_can(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "metrics.jsonl")
    metrics = {"step": 1, "reward/mean": np.float32(0.5), "loss/policy": math.nan, "optim/grad_norm": math.inf}
    log.append(metrics)
    expected = {"step": 1, "reward/mean": 0.5, "loss/policy": None, "optim/grad_norm": None}
    assert read_metrics(tmp_path / "metrics.jsonl") == [expected]
    facts = {"x": np.float32(math.inf), "y": True, "z": None}
    assert log.append({"kind": "tod", "ids": (1, np.int64(2)), "facts": facts}) is None
    second = {"kind": "tod", "ids": [1, 2], "facts": {"x": None, "y": True, "z": None}}
    assert read_metrics(tmp_path / "metrics.jsonl") == [expected, second]


def test_a_full_disk_loses_the_oldest_of_many_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    log, long = JsonLines(path), {"note": 10**90}
    with file_size_limit(100):
        assert log.append({"step": 1, "x": 1.0}) is None
        length = path.stat().st_size
        error = log.append({"step": 2, **long})  # a part of it fits
        assert "File too large; 1 lines wait in memory" in error
        assert path.stat().st_size == length
        assert "2 lines wait" in str(log.append({"step": 3}))  # it would fit, but order is kept
    with file_size_limit(150):
        assert "1 lines wait" in str(log.append({"step": 4, **long}))
        assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]  # what fits is written
    for step in (5, 6):
        assert log.append({"step": step}) is None
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4, 5, 6]
    monkeypatch.setattr("grpo_ray.records.json_lines.MAX_PENDING", 3)
    with file_size_limit(path.stat().st_size):
        *_, error = (log.append({"step": step}) for step in range(7, 12))
    assert error.endswith("3 lines wait in memory; 2 older ones are lost")
    assert log.append({"step": 12}) is None
    assert [row["step"] for row in read_metrics(path)[6:]] == [9, 10, 11, 12]


def test_a_replay_memory_may_have_more_tokens_than_32_bits_count() -> None:
    rows = _list_array([2**30, 2**30, 10], pa.nulls(2**31 + 10))
    assert rows.offsets.to_pylist() == [0, 2**30, 2**31, 2**31 + 10]


def test_rollouts_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "step-000007.parquet"
    write_rollouts(path, 7, [make_group(3, [[1, 1, 2], [2]]), make_group(4, [[], [0, 0]])])
    rows = read_rollouts(path)
    expected = [(3, 0, 3), (3, 1, 1), (4, 0, 0), (4, 1, 2)]
    assert [(row["group_id"], row["sample"], row["num_tokens"]) for row in rows] == expected
    assert rows[0] == {
        "step": 7, "use": 1, "group_id": 3, "task": "", "sample": 0,
        "prompt": "prompt 3", "response": "response 3.0", "ground_truth": "truth 3",
        "reward": 0.5, "format_reward": 0.0, "answer_reward": 0.5, "advantage": -1.0, "num_tokens": 3,
        "error": None, "ungradable": None, "finish_reason": "stop",
        "min_version": 1, "max_version": 2, "generator": "generator-0",
        "prompt_token_ids": [1, 2], "token_ids": [100, 101, 102], "logprobs": [0.0, -1.0, -2.0],
        "versions": [{"version": 1, "start": 0, "end": 2}, {"version": 2, "start": 2, "end": 3}],
    }  # fmt: skip
    assert (rows[2]["min_version"], rows[2]["token_ids"], rows[2]["versions"]) == (None, [], [])
    assert [file.name for file in tmp_path.iterdir()] == [path.name]  # no partial file is left
    write_rollouts(path, 8, [])
    assert read_rollouts(path) == []


def test_each_group_has_its_own_uses(tmp_path: Path) -> None:
    path = tmp_path / "step-000007.parquet"
    groups = [make_group(3, [[1], [2], [2]]), make_group(1, [[0]]), make_group(4, [[2], [2]])]
    write_rollouts(path, 7, groups, [1, 3, 0])
    found = [(row["group_id"], row["use"]) for row in read_rollouts(path)]
    assert found == [(3, 1), (3, 1), (3, 1), (1, 3), (4, 0), (4, 0)]
    assert read_uses(path) == [1, 3, 0]
    assert same_groups(read_groups(path), groups)
    write_rollouts(path, 7, groups)
    assert read_uses(path) == [1, 1, 1]
    write_rollouts(path, 7, [], [])
    assert read_uses(path) == []
    with pytest.raises(ValueError, match="zip"):
        write_rollouts(path, 7, groups, [1, 1])
    assert os.listdir(tmp_path) == [path.name]


floats = st.floats(width=32)  # including infinities, nan and -0.0


@st.composite
def scored_groups(draw: st.DrawFn) -> ScoredGroup:
    def array(strategy: st.SearchStrategy, size: int, dtype: type) -> np.ndarray:
        return np.array(draw(st.lists(strategy, min_size=size, max_size=size)), dtype=dtype)

    def completion(size: int) -> Completion:
        return Completion(
            text=draw(TEXT),
            token_ids=array(st.integers(0, 2**31 - 1), size, np.int32),
            logprobs=array(floats, size, np.float32),
            versions=array(st.integers(0, 3), size, np.int32),
            finish_reason=draw(st.sampled_from(["stop", "length"])),
        )

    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    prompt_ids = tuple(draw(st.lists(st.integers(0, 2**31 - 1), max_size=4)))
    item = PromptItem(draw(st.integers(0, 2**40)), draw(TEXT), prompt_ids, draw(TEXT), task=draw(TEXT))
    rollout = RolloutGroup(item, tuple(completion(size) for size in sizes), draw(TEXT))
    scores = [array(floats, len(sizes), np.float32) for _ in range(4)]
    reasons = st.dictionaries(st.integers(0, len(sizes) - 1), TEXT)
    return ScoredGroup(*scores, rollout=rollout, errors=draw(reasons), ungradable=draw(reasons))


@pytest.mark.slow
@settings(max_examples=30)
@given(st.lists(scored_groups(), max_size=4))
def test_groups_come_back_bit_for_bit(groups: list[ScoredGroup]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "groups.parquet"
        write_rollouts(path, None, groups, fsync=True)
        assert same_groups(read_groups(path), groups)
        assert os.listdir(folder) == [path.name]


def test_groups_read_back_do_not_keep_the_file_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "groups.parquet"
    write_rollouts(path, None, [make_group(3, [[1, 1, 2], [2]])])
    (group,) = read_groups(path)
    for array in (group.rewards, group.rollout.completions[0].token_ids, group.rollout.completions[0].versions):
        assert array.base is None
        assert array.flags.writeable


def test_full_disk_leaves_no_part_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "step-000001.parquet"
    write_rollouts(path, 1, [make_group(7, [[1]])])  # the old file stays
    with file_size_limit(1000), pytest.raises(OSError, match="File too large"):
        write_rollouts(path, 1, [make_group(number, [[1, 2, 3]]) for number in range(50)])
    assert os.listdir(tmp_path) == [path.name]
    assert [row["group_id"] for row in read_rollouts(path)] == [7]


def test_the_catalog_knows_its_names() -> None:
    assert check_names([*METRICS, "memory/learner_bytes"]) == []
    assert check_names({"reward/mean": 1.0, "reward/men": 1.0, "x": 0.0}) == ["reward/men", "x"]
    assert all(meaning for _, meaning in METRICS.values())
    json.dumps(METRICS)


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"step": 1, "a": 1.5}\n',
        '{"step": 1}\n{"step": 2, "a": 0}\n{"step": 1, "a": 3}\n{"step": 4, "a": null}\n',  # step 1 twice
        '{"a": 1, "step": 7}\n{"step":6}\n{"step": 12}\n',  # as another program might write it
        '{"step": 3, "a": "é"}\n{"step": 4, "a"',  # killed while it wrote
        '{"step": 3}\n\0\0\n\0\n',  # after a power cut
    ],
)
def test_the_last_row_of_a_step_counts(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text, encoding="utf-8")
    lines = StepLines(path)
    expected = [row for _, row in sorted({row["step"]: row for row in read_metrics(path)}.items())]
    assert [list(lines), list(lines)] == [expected, expected]  # more than once
    assert list(lines.steps) == [row["step"] for row in expected]
    monkeypatch.setattr("grpo_ray.records.rollout_log.PART", 1)
    assert (rows := log_table(lines).to_pylist()) == [{**dict.fromkeys(rows[0]), **row} for row in expected]


def test_half_a_line_is_dropped_on_resume_and_rows_that_were_found_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert (list(StepLines(path)), last_logged_step(path)) == ([], 0)  # it does not exist
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "reward/me')
    lines = StepLines(path)
    assert (read_metrics(path), last_logged_step(path)) == ([{"step": 1}, {"step": 2}], 2)
    JsonLines(path).append({"step": 3, "lag/max": 0.0})
    assert read_metrics(path) == [{"step": 1}, {"step": 2}, {"step": 3, "lag/max": 0.0}]
    assert [row["step"] for row in lines] == [1, 2]


@pytest.mark.parametrize("line", ['{"step": 2, "a": }', "garbage", '{"step": 2, "a": "\udcff"}', '{"a": 1}'])
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n'.encode(errors="surrogateescape"))
    problem = "it has no step" if line == '{"a": 1}' else "not valid JSON"
    for read in (StepLines, lambda path: read_lines(path, fields=STEP)):
        with pytest.raises(ValueError, match=f"metrics.jsonl, line 2: {problem}; remove the line"):
            list(read(path))
