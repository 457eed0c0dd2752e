"""Whole runs of the real actors on local Ray: staleness, the ledger, learning."""

import asyncio
import json
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from run_process import num_lines, pid_of, wait_for_step, wait_until
from small_run import QUICKSTART, SMALL

from grpo_ray.cluster import session
from grpo_ray.cluster.hosting import running
from grpo_ray.config import Config
from grpo_ray.config.loading import load_config
from grpo_ray.run.controller import Controller
from grpo_ray.run.preflight import check_files, prepare
from grpo_ray.run.restarts import RestartBudget
from grpo_ray.telemetry.checkpoint import make_store
from grpo_ray.telemetry.evaluation_summary import EvaluationSummary
from grpo_ray.telemetry.metrics_catalog import check_names
from grpo_ray.telemetry.rollout_log import read_rollouts
from grpo_ray.telemetry.run_files import RunDirectory, read_metrics
from grpo_ray.telemetry.run_log import RunLog
from grpo_ray.tools.audit.audit import audit
from grpo_ray.tools.experiments.launch import PROGRAM

pytestmark = pytest.mark.usefixtures("model_cache")


class Silent:
    def status(self, text: str) -> None: ...
    def step(self, step: int, metrics: dict[str, float]) -> None: ...
    def evaluation(self, summary: EvaluationSummary) -> None: ...

    def warning(self, text: str) -> None:
        print(text)


@pytest.fixture(scope="module")
def local_ray():
    with session.connected():
        yield


def run_actors(config: Config, folder: Path, actors_config: Config | None = None) -> RunDirectory:
    prepared = prepare(config, check_files(config))
    run = RunDirectory(folder)
    run.create(config)
    store = make_store(config, run)
    actors_config = actors_config or config
    with (
        session.placed(actors_config) as placement,
        running(placement, actors_config, prepared.model, folder) as actors,
    ):
        log, budget = RunLog(run, Silent()), RestartBudget(0, 0.0)
        asyncio.run(Controller(config, prepared, actors, log, store, budget).run())
    return run


@pytest.mark.ray
@pytest.mark.parametrize(
    ("max_lag", "num_generators", "slow", "in_flight"),
    [
        (0, 1, "generator", True),
        (1, 2, "learner", True),  # more combinations, without Ray, in test_controller.py
    ],
)
def test_lag_is_bounded_and_every_prompt_is_trained_once(
    local_ray, tmp_path, max_lag, num_generators, slow, in_flight
):
    config = load_config(
        QUICKSTART,
        [
            *SMALL,
            f"weight_sync.max_lag={max_lag}",
            f"weight_sync.in_flight={in_flight}",
            f"generator.num_generators={num_generators}",
            f"{slow}.slowdown_s=0.15",
        ],
    )
    run = run_actors(config, tmp_path / "run")
    metrics = read_metrics(run.metrics_path)
    assert [row["step"] for row in metrics] == list(range(1, 9))
    assert all(row["lag/max"] <= max_lag for row in metrics)
    assert all(row["lag/rejected"] == 0 for row in metrics)
    if slow == "learner":  # the schedule is really used: Generators run ahead as far as they may
        assert metrics[-1]["lag/max"] == max_lag

    # Each step's file holds that step's groups, each group once, over one epoch and a third.
    trained = [
        (row["step"], row["group_id"]) for s in range(1, 9) for row in read_rollouts(run.rollouts_path(s))
    ]
    assert sorted(set(trained)) == [(group // 4 + 1, group) for group in range(32)]
    assert len(trained) == 32 * 2
    prompts = {
        row["group_id"]: row["prompt"] for s in range(1, 9) for row in read_rollouts(run.rollouts_path(s))
    }
    assert len({prompts[group] for group in range(24)}) == 24
    assert {prompts[group] for group in range(24, 32)} <= {prompts[group] for group in range(24)}

    # The lag in the metrics is the one in the rollouts, and both Generators took part.
    for row in metrics:
        rollouts = read_rollouts(run.rollouts_path(row["step"]))
        assert row["lag/max"] == row["step"] - 1 - min(r["min_version"] for r in rollouts)
    rollouts = [row for s in range(1, 9) for row in read_rollouts(run.rollouts_path(s))]
    assert len({row["generator"] for row in rollouts}) == num_generators
    if not in_flight:
        assert all(row["min_version"] == row["max_version"] for row in rollouts)

    # Every actor's time is accounted for, in the metrics and in the timeline.
    whole, rows = sum(row["timing/step_s"] for row in metrics), json.loads(run.timeline_path.read_text())
    names = {row["tid"]: row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    generators = {f"generator-{index}" for index in range(num_generators)}
    assert set(names.values()) == {"driver", "learner", "buffer", "scorer", "weight_sync"} | generators
    for tid, name in names.items():
        told = sum(v for row in metrics for k, v in row.items() if k.startswith(f"time/{name}/"))
        drawn = sum(row["dur"] / 1e6 for row in rows if row["ph"] == "X" and row["tid"] == tid)
        assert told == pytest.approx(whole, rel=0.02), name
        assert drawn == pytest.approx(told, abs=0.001), name

    assert not check_names({k: v for row in metrics for k, v in row.items() if k != "step"})
    summaries = [json.loads(line) for line in run.evaluations_summary_path.read_text().splitlines()]
    assert [(s["step"], s["version"]) for s in summaries] == [(0, 0), (4, 4), (8, 8)]


@pytest.mark.ray
def test_no_replayed_group_is_older_than_max_age(local_ray, tmp_path):
    """With a slow Learner, a look-ahead and two Generators; test_schedules.py has more, without Ray."""
    schedule = ["buffer.replay.frac=0.5", "buffer.replay.max_age=2", "buffer.lookahead=2"]
    speeds = ["learner.slowdown_s=0.1", "generator.slowdown_s=0.02", "generator.num_generators=2"]
    run = run_actors(load_config(QUICKSTART, [*SMALL, *schedule, *speeds]), tmp_path / "run")
    metrics = read_metrics(run.metrics_path)
    assert [row["step"] for row in metrics] == list(range(1, 9))
    ages: dict[bool, set[int]] = {False: set(), True: set()}
    for row in metrics:
        for rollout in read_rollouts(run.rollouts_path(row["step"])):
            ages[rollout["use"] > 1].add(row["step"] - 1 - rollout["min_version"])
    assert max(ages[False]) <= 1
    assert max(ages[True]) == 2  # as old as it may be, and no older
    assert max(row["lag/max"] for row in metrics) == 2
    assert audit(run).problems == []


@pytest.mark.ray
def test_a_group_that_slipped_past_admission_is_refused_and_sampled_again(local_ray, tmp_path):
    """The second guard alone: the actors admit one version behind, the controller asks for lag 0."""
    strict, lax = (load_config(QUICKSTART, [*SMALL, f"weight_sync.max_lag={lag}"]) for lag in (0, 1))
    run = run_actors(strict, tmp_path / "run", actors_config=lax)
    metrics = read_metrics(run.metrics_path)
    assert sum(row["lag/rejected"] for row in metrics) > 0
    assert all(row["lag/max"] == 0 for row in metrics)
    trained = [row["group_id"] for s in range(1, 9) for row in read_rollouts(run.rollouts_path(s))]
    assert sorted(trained) == sorted([*range(32), *range(32)])  # two samples each, once


def kill_engine(folder: Path, generator: str) -> None:
    """End the process in which vLLM runs."""
    children = psutil.Process(pid_of(folder, generator)).children()
    (engine,) = [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]
    engine.kill()


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(420)
def test_the_quickstart_learns_through_vllm_one_version_behind(tmp_path):
    """A short form of `make quickstart`: the real model, task, engine and schedule."""
    command = [
        *PROGRAM,
        "train",
        QUICKSTART,
        f"run.output_dir={tmp_path}",
        "run.name=r",
        "algorithm.num_steps=20",
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    run = RunDirectory(tmp_path / "r")
    rewards = {row["step"]: row["reward"] for row in read_metrics(run.evaluations_summary_path)}
    assert rewards[0] < 0.45
    assert rewards[20] >= 0.7
    metrics = read_metrics(run.metrics_path)
    assert max(row["lag/max"] for row in metrics) == 1
    assert (run.path / "reward_curve.png").read_bytes().startswith(b"\x89PNG")
    assert (run.checkpoint_path(20) / "config.json").exists()


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(420)
def test_synchronous_logprobs_of_two_vllm_generators_and_the_learner_agree(tmp_path):
    """Also those of an engine that took the place of one that was killed."""
    run = RunDirectory(tmp_path / "r")
    arguments = [
        "train", QUICKSTART, f"run.output_dir={tmp_path}", "run.name=r", "algorithm.num_steps=1000",
        "weight_sync.max_lag=0", "generator.num_generators=2", "task.num_validation_prompts=16",
        "learner.slowdown_s=1", "checkpoint.every_num_steps=1000", "evaluation.every_num_steps=1000",
    ]  # fmt: skip
    process = subprocess.Popen(
        [*PROGRAM, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    wait_for_step(process, run.path, 2, timeout_s=300)
    kill_engine(run.path, "generator-1")
    events = run.path / "events.jsonl"
    wait_until(process, lambda: events.exists() and '"generator_back"' in events.read_text())
    came_back = num_lines(run.metrics_path)
    wait_for_step(process, run.path, came_back + 3)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output

    metrics = read_metrics(run.metrics_path)
    last = read_rollouts(run.rollouts_path(came_back + 3))
    assert {row["generator"] for row in last} == {"generator-0", "generator-1"}
    assert max(row["lag/max"] for row in metrics) == 0
    assert max(row["mismatch/kl"] for row in metrics) < 1e-5
    assert max(row["mismatch/logprob_diff/max"] for row in metrics) < 1e-3
    assert audit(run).problems == []
