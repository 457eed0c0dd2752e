"""Runs on real Ray with `weight_sync.transport: collective`: processes killed in the middle of a transfer."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from run_process import EVERY_THIRD, num_lines, pid_of, wait_for_step, wait_until
from small_run import QUICKSTART, SMALL

from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.tools.audit.audit import audit

pytestmark = [pytest.mark.ray, pytest.mark.campaign, pytest.mark.usefixtures("model_cache", "any_reward")]
PROGRAM = str((Path(__file__).parents[1] / "held_wire_cli.py"))
STEPS = 8


def run_with_a_death(folder: Path, victim: str, *overrides: str) -> RunDirectory:
    """Kill the victim while two transfers of step 4 or later wait for the weights, and let the run finish."""
    run = RunDirectory(folder / "run")
    arguments = [
        "train", QUICKSTART, *SMALL, EVERY_THIRD, f"run.output_dir={folder}", "run.name=run",
        "weight_sync.transport=collective", "weight_sync.checksum=true", "generator.num_generators=2",
        "recovery.restart_backoff_s=0.1", f"algorithm.num_steps={STEPS}", *overrides,
    ]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, PROGRAM, str(folder), *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        wait_for_step(process, run.path, 3)
        (folder / "hold").touch()
        wait_until(process, (folder / "held").exists)
        before = num_lines(run.metrics_path)
        os.kill(pid_of(run.path, victim), signal.SIGKILL)
        (folder / "hold").unlink()
        output, _ = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert before < STEPS
    assert [row["step"] for row in read_metrics(run.metrics_path)] == list(range(1, STEPS + 1))
    assert audit(run).problems == []
    return run


def events(run: RunDirectory, kind: str) -> list[tuple[str | None, str]]:
    return [(event["actor"], event["text"]) for event in read_metrics(run.events_path) if event["kind"] == kind]


def test_a_generator_killed_in_a_transfer_is_replaced_and_the_other_goes_on(tmp_path: Path) -> None:
    run = run_with_a_death(tmp_path, "generator-1", "learner.slowdown_s=0.3")
    assert [actor for actor, _ in events(run, "generator_failed")] == ["generator-1"]
    assert events(run, "restored") == []


def test_a_rank_of_the_learner_killed_in_a_transfer_is_restored_with_the_others(tmp_path: Path) -> None:
    run = run_with_a_death(tmp_path, "learner-0", "learner.num_ranks=2")
    assert events(run, "generator_failed") == []
    ((_, failed),) = events(run, "run_failed")
    assert "learner-0" in failed
    assert len(events(run, "restored")) == 1
