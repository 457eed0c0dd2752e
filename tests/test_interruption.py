"""A run that is interrupted, killed and resumed from the command line: real processes, real Ray."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from local_runs import train
from run_process import wait_for_step, wait_until
from safetensors.torch import load_file
from small_run import QUICKSTART, SMALL

from grpo_ray.config.loading import load_config
from grpo_ray.telemetry.run_files import RunDirectory, read_metrics
from grpo_ray.tools.audit.audit import audit
from grpo_ray.tools.cli import main

pytestmark = pytest.mark.usefixtures("model_cache")

PROGRAM = str(Path(__file__).with_name("any_reward_cli.py"))
EVERY_THIRD = "checkpoint.every_num_steps=3"


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, PROGRAM, "train", QUICKSTART, *SMALL, EVERY_THIRD]
    command += [f"run.output_dir={folder.parent}", f"run.name={folder.name}", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def resume(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, PROGRAM, "resume", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def wait_until_gone(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Return those that are still there after `timeout_s`."""
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def used_by(driver: subprocess.Popen[str]) -> tuple[list[psutil.Process], set[str]]:
    """Return the processes below a driver, and the files in /dev/shm that all of them use."""
    children, files = psutil.Process(driver.pid).children(recursive=True), set()
    for process in [psutil.Process(driver.pid), *children]:
        with contextlib.suppress(psutil.NoSuchProcess):
            files |= {m.path for m in process.memory_maps() if m.path.startswith("/dev/shm/")}
    return children, files


def untimed(row: dict[str, Any]) -> dict[str, Any]:
    timed = ("time/", "timing/", "throughput/", "utilization/", "memory/", "perf/")
    return {name: value for name, value in row.items() if not name.startswith(timed)}


@pytest.mark.ray
@pytest.mark.usefixtures("any_reward")
def test_a_synchronous_run_that_is_interrupted_killed_and_resumed_equals_one_that_was_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights, optimizer and every figure agree to the last bit; no process and no shared memory is left.

    The uninterrupted run has its actors in this process.
    """
    folder, exact = tmp_path / "run", ["weight_sync.max_lag=0", "algorithm.num_steps=10"]
    process = start(folder, *exact, "learner.slowdown_s=0.3")
    wait_for_step(process, folder, 3)
    children, shared_memory = used_by(process)
    assert len(children) > 5  # raylet, and an actor each
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert "never awaited" not in output
    assert process.returncode == 130, output
    assert f"grpo-ray resume {folder}" in output
    assert wait_until_gone(children, 30) == []
    assert not [path for path in shared_memory if os.path.exists(path)]
    num_steps = len(read_metrics(folder / "metrics.jsonl"))
    assert 3 <= num_steps < 8

    # As a scheduler submits it again.
    process = start(folder, *exact, "learner.slowdown_s=0.3", "run.if_exists=resume")
    wait_for_step(process, folder, num_steps + 1)
    assert main(["resume", str(folder)]) == 2
    assert f"another process (pid {process.pid} on host" in capsys.readouterr().err
    children, shared_memory = used_by(process)
    process.kill()
    process.wait()
    assert wait_until_gone(children, 120) == []
    assert not [path for path in shared_memory if os.path.exists(path)]
    assert len(read_metrics(folder / "metrics.jsonl")) < 10

    resumed = resume(folder, "learner.slowdown_s=0")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    run, whole = RunDirectory(folder), RunDirectory(tmp_path / "whole")
    train(load_config(QUICKSTART, [*SMALL, EVERY_THIRD, *exact]), whole.path)
    rows = [[untimed(row) for row in read_metrics(each.metrics_path)] for each in (whole, run)]
    assert any(row["optim/grad_norm"] > 0 for row in rows[0])
    assert rows[0] == rows[1]
    assert read_metrics(whole.evaluations_summary_path) == read_metrics(run.evaluations_summary_path)
    for file in ("model.safetensors", "training/optimizer.safetensors"):
        tensors, resumed_tensors = (load_file(each.checkpoint_path(10) / file) for each in (whole, run))
        assert tensors.keys() == resumed_tensors.keys()
        assert all(torch.equal(tensors[name], resumed_tensors[name]) for name in tensors), file
    assert audit(run).problems == []

    assert main(["resume", str(folder)]) == 0
    assert "all 10 steps are done" in capsys.readouterr().out


@pytest.mark.ray
def test_sigterm_has_a_deadline_and_a_second_signal_none(tmp_path: Path) -> None:
    """A step that outlasts the warning is abandoned; a second signal does not even wait for that."""
    slow = ["learner.slowdown_s=1000", "algorithm.num_steps=5", "run.on_preemption_s=1"]
    cases = {"deadline": [signal.SIGTERM], "twice": [signal.SIGINT] * 2}
    processes = {name: start(tmp_path / name, *slow) for name in cases}  # both at once: most of it is the start
    children: list[psutil.Process] = []
    for name, signals in cases.items():
        rollouts = tmp_path / name / "rollouts" / "step-000001.parquet"
        wait_until(processes[name], rollouts.exists)  # the first batch is with the Learner now
        children += used_by(processes[name])[0]
        for number in signals:
            processes[name].send_signal(number)
            time.sleep(0.5)
    outputs = {name: process.communicate(timeout=120)[0] for name, process in processes.items()}
    assert processes["deadline"].returncode == 130, outputs["deadline"]
    assert "no checkpoint could be written in 1 s" in outputs["deadline"]
    assert processes["twice"].returncode != 0
    assert wait_until_gone(children, 120) == []
