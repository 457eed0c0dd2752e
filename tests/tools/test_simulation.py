"""Whole simulated runs: they repeat to the byte, survive faults, and keep every schedule's promise."""

import json
import re
import tempfile
from array import array
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import check_names, make_completion, make_group, make_item
from commands import Capture, printed, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from small_run import QUICKSTART

from grpo_ray.config.loading import load_config
from grpo_ray.records.json_lines import read_lines
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.tools.audit.audit import audit
from grpo_ray.tools.simulation.simulate import Simulated, lines_of, simulate
from grpo_ray.tools.simulation.speeds import Speeds, lognormal, read_lengths, read_speeds
from grpo_ray.tools.simulation.workers import Account, Faults

SMALL = [
    "generator.num_generators=3", "sampling.max_tokens=200", "weight_sync.in_flight=true",
    "algorithm.num_steps=6", "algorithm.prompts_per_step=4", "algorithm.samples_per_prompt=2",
    "evaluation.every_num_steps=1000", "checkpoint.every_num_steps=2",
    "recovery.max_restarts=10000", "recovery.max_restores=10000", "recovery.restart_backoff_s=0.5",
]  # fmt: skip
FAST = Speeds(start_s=1.0, stage_s=0.2, load_s=0.1, train_s=0.5, snapshot_s=0.1)


def simulated(
    folder: Path, *overrides: str, speeds: Speeds = FAST, trace: Any = None, mean: float = 50.0
) -> Simulated:
    config = load_config(QUICKSTART, [*SMALL, *overrides])
    return simulate(config, RunDirectory(folder), speeds, lognormal(mean, 1.0), trace)


FAULTS = FAST.model_copy(update={"generator_life_s": 20.0, "learner_life_s": 12.0})


@pytest.mark.slow
def test_a_run_repeats_to_the_byte_with_its_faults(tmp_path: Path) -> None:
    """And with a summary, although it was restored."""
    traces: dict[str, list[str]] = {"one": [], "other": [], "seeded": []}
    for name, seed in (("one", 3), ("other", 3), ("seeded", 4)):
        # The same folder's name: the timeline has it.
        folder, changes = tmp_path / name / "run", (f"run.seed={seed}", "algorithm.num_steps=10")
        result = simulated(folder, *changes, speeds=FAULTS, trace=traces[name].append)
        (line,) = [line for line in lines_of(result) if line.startswith("step ")]
        mean, median, low, high, longest = map(float, re.findall(r"-?\d+\.\d+", line))
        assert 0 < low <= median <= high <= longest
        assert low <= mean <= longest
    assert traces["one"] == traces["other"]
    assert traces["one"] != traces["seeded"]
    for file in ("metrics.jsonl", "events.jsonl", "timeline.json"):
        one, other = ((tmp_path / name / "run" / file).read_bytes() for name in ("one", "other"))
        assert one == other, file
    kinds = {json.loads(line)["kind"] for line in (tmp_path / "one/run/events.jsonl").read_text().splitlines()}
    assert {"generator_failed", "generator_back", "restored"} <= kinds


@pytest.mark.slow
def test_a_simulated_run_passes_the_audit_of_real_ones_and_gives_its_lengths(tmp_path: Path) -> None:
    """The records have the form of a real run's, so an independent reader can check them."""
    result = simulated(tmp_path / "run", "run.save_rollouts=true", "algorithm.num_steps=12", speeds=FAULTS)
    report = audit(RunDirectory(tmp_path / "run"))
    # Rewards are drawn by chance, and there are no checkpoints of weights.
    assert [line for line in report.problems if "group" in line and "reward" not in line] == []
    assert (report.num_steps, report.num_groups) == (12, 48)
    assert result.faults.is_none
    assert check_names({name for row in result.steps for name in row} - {"step"}) == []
    lengths = read_lengths(str(tmp_path / "run"))
    assert len(lengths) == 12 * 4 * 2
    assert 1 < np.mean(lengths) < 200
    RunDirectory(tmp_path / "run").rollouts_path(6).write_bytes(b"")
    with pytest.raises(ValueError, match=r"step-000006\.parquet: not readable as Parquet .*; remove it to"):
        read_lengths(str(tmp_path / "run"))


OVERSAMPLED = ["weight_sync.max_lag=1", "algorithm.oversample_frac=0.5"]
REPLAY = ["buffer.replay.frac=0.25", "buffer.replay.max_age=3"]
SCHEDULES = {
    "synchronous": ["weight_sync.max_lag=0"],
    "drained": ["weight_sync.max_lag=1", "weight_sync.in_flight=false"],
    "in flight": ["weight_sync.max_lag=2"],
    "oversampled, drained": [*OVERSAMPLED, "weight_sync.in_flight=false"],
    "replay": ["weight_sync.max_lag=1", *REPLAY],
    "tight": ["weight_sync.max_lag=3", "buffer.max_gib=1e-6"],
    "colocated": ["weight_sync.max_lag=0", "generator.colocated=true"],
    "lookahead, dynamic": ["weight_sync.max_lag=3", "buffer.lookahead=6", "algorithm.dynamic_sampling_tries=2"],
    "oversampled, replay": [*OVERSAMPLED, *REPLAY],
    "distilled": ["weight_sync.max_lag=1", "distillation.teacher=a-teacher", "sampling.min_tokens=0"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=2)
@given(
    seed=st.integers(0, 10**6), num_generators=st.integers(1, 5), mean=st.sampled_from([2.0, 20.0, 150.0]),
    train_s=st.sampled_from([0.001, 0.3, 5.0]), stage_s=st.sampled_from([0.0, 2.0]),
    life_s=st.sampled_from([None, 8.0]),
)  # fmt: skip
def test_no_schedule_trains_an_old_token_or_loses_a_prompt(
    name: str, seed: int, num_generators: int, mean: float, train_s: float, stage_s: float, life_s: float | None
) -> None:
    speeds = FAST.model_copy(update={"train_s": train_s, "stage_s": stage_s, "generator_life_s": life_s})
    changes = ["checkpoint.every_num_steps=1000", f"run.seed={seed}", *SCHEDULES[name]]
    changes += [f"generator.num_generators={num_generators}"]
    with tempfile.TemporaryDirectory() as folder:
        result = simulated(Path(folder) / "run", *changes, speeds=speeds, mean=mean)
        events = read_lines(Path(folder) / "run/events.jsonl")
    set_aside = {event["group_id"] for event in events if event["kind"] == "set_aside"}
    assert life_s is not None or not set_aside  # some died with an engine each time that they were sampled
    assert result.faults.is_none, result.faults
    config, last = result.config, result.account.trained
    assert [len(step) for step in last] == [config.fresh_per_step] * config.algorithm.num_steps
    assert max(result.account.lag_shares()) <= config.max_token_age
    if name in ("synchronous", "drained", "in flight", "replay", "tight", "colocated"):  # strict order
        order = [g for step in last for g in step]
        assert order == [g for g in range(order[-1] + 1) if g not in set_aside]
    rejected = [row["lag/rejected"] for row in result.steps]
    assert rejected == [0.0] * len(rejected)  # admission alone suffices


AGES = {
    "wait": ["weight_sync.max_lag=1"],
    "wait, synchronous": ["weight_sync.max_lag=0", "weight_sync.in_flight=false"],
    "mask": [*OVERSAMPLED, "episodes.over_age=mask"],
    "drop": [*OVERSAMPLED, "episodes.over_age=drop"],
}
EPISODES = [
    "episodes.num_workers=2", "episodes.max_concurrent=4", "episodes.max_tokens=700", "episodes.max_turns=4",
    "sampling.max_tokens=100", "scorer.num_workers=8",
    "recovery.max_group_retries=1000", "recovery.max_group_losses=1000", "recovery.max_restarts=100000",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", AGES)
@settings(max_examples=2)
@given(
    seed=st.integers(0, 10**6), environment_s=st.sampled_from([0.0, 3.0]),
    train_s=st.sampled_from([0.001, 5.0]), life_s=st.sampled_from([None, 60.0]),
)  # fmt: skip
def test_no_schedule_of_episodes_trains_an_old_token_or_loses_a_prompt(
    name: str, seed: int, environment_s: float, train_s: float, life_s: float | None
) -> None:
    """Turns go over the run's own routers; Generators and EnvironmentWorkers die meanwhile."""
    lives = {"generator_life_s": life_s, "environment_life_s": life_s}
    speeds = FAST.model_copy(update={"train_s": train_s, "environment_s": environment_s, **lives})
    changes = [*SMALL, *EPISODES, "checkpoint.every_num_steps=1000", f"run.seed={seed}", *AGES[name]]
    config = load_config("configs/calculator.yaml", changes)
    with tempfile.TemporaryDirectory() as folder:
        result = simulate(config, RunDirectory(Path(folder) / "run"), speeds, lognormal(30.0, 1.0))
    assert result.faults.is_none, result.faults
    assert [len(step) for step in result.account.trained] == [4] * 6
    assert max(result.account.lag_shares()) <= config.max_token_age
    assert 1 < np.mean([row["episodes/turns/mean"] for row in result.steps]) <= 4


def test_episodes_end_at_their_limits(tmp_path: Path) -> None:
    changes = [*SMALL, *EPISODES, "episodes.max_tokens=340", "episodes.max_seconds=8"]
    config = load_config("configs/calculator.yaml", changes)
    speeds = FAST.model_copy(update={"environment_s": 4.0, "prompt_tokens": 100, "answer_tokens": 50})
    result = simulate(config, RunDirectory(tmp_path / "run"), speeds, lognormal(30.0, 1.0))
    ends = ("finished", "truncated_turns", "truncated_tokens", "truncated_time")
    shares = {end: np.mean([row[f"episodes/status/{end}"] for row in result.steps]) for end in ends}
    assert min(shares.values()) > 0
    assert sum(shares.values()) == pytest.approx(1)


Book: Any = namedtuple("Book", ["next_id", "unfinished", "given_up", "num_dropped"])


@pytest.mark.parametrize(
    ("trained", "book", "faults"),
    [
        ([[0, 1], [2, 4]], Book(6, {5}, {3}, 0), Faults(0, 0, 0)),
        ([[0, 1], [2, 4]], Book(7, {5}, {3}, 1), Faults(0, 0, 0)),
        ([[0, 1], [1, 2]], Book(3, set(), set(), 0), Faults(0, 1, 0)),
        ([[0, 1], [3, 4]], Book(5, set(), set(), 0), Faults(0, 0, 1)),
        ([[0, 1], [2, 3]], Book(4, {3}, set(), 0), Faults(0, 1, 0)),
    ],
)
def test_lost_and_repeated_prompts_are_counted(trained: Any, book: Any, faults: Faults) -> None:
    account = Account(max_age=1)
    account.trained = [array("q", step) for step in trained]
    assert account.faults(book) == faults


def test_old_tokens_are_counted_and_a_restored_run_forgets_later_steps() -> None:
    account = Account(max_age=1)
    for version, versions in ((0, [0, 0]), (1, [0, 1]), (3, [1, 3])):
        completions = [make_completion([5, 6], versions=versions)] * 2
        account.note(version, [make_group(make_item(version), completions, [1, 0], [1.0, -1.0])], [])
    assert account.num_stale == 1  # version 1 trained at version 3
    assert account.lag_shares() == {0: 8 / 12, 1: 2 / 12, 2: 2 / 12}
    account.rewind(1)
    assert [list(step) for step in account.trained] == [[0]]
    assert account.lag_shares() == {0: 1.0}


@pytest.mark.slow
def test_the_command_prints_what_happened(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "speeds.json").write_text('{"decode_s": 0.5, "train_s": 0.01, "train_token_s": 0}')
    arguments = ["simulate", QUICKSTART, *SMALL, "--generators", "20", "--steps", "5", "--seed", "3"]
    files = ["--speeds", tmp_path / "speeds.json", "--trace", tmp_path / "trace"]
    shown = printed(capsys, *arguments, "--length-mean", "40", *files, "--out", tmp_path / "run")
    assert shown.startswith("20 Generators, 5 steps of 4 groups of 2, max_lag 1\n")
    assert "faults          0 groups too old, 0 prompts lost, 0 repeated" in shown
    assert "Learner waits" in shown  # decoding is slow here
    row = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert {"time/generators/generate_s", "time/slowest-generator/generate_s"} <= row.keys()
    assert not any(name.startswith("time/generator-") for name in row)
    assert " generator-19 switch\n" in (tmp_path / "trace").read_text()
    exists = "run: it exists already; give a new folder"
    assert exists in refused(capsys, *arguments, "--out", tmp_path / "run")
    (tmp_path / "speeds.json").write_text('{"learner_life_s": 1}')
    message = refused(capsys, *arguments[:-6], *files, "recovery.max_restores=1")
    assert re.search(r"learner died: .*\nGive --out DIR to keep the run's records\n$", message)


def test_files_of_lengths_and_speeds_that_are_missing_or_wrong_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--recorded .*nothing: there are no rollouts in it"):
        read_lengths(str(tmp_path / "nothing"))
    (tmp_path / "speeds.json").write_text('{"decode_s": 0.5, "brake_s": 1}')
    with pytest.raises(ValueError, match=r"speeds\.json: brake_s: Extra inputs are not permitted$"):
        read_speeds(str(tmp_path / "speeds.json"))
