"""A run that is interrupted, killed and resumed from the command line: real processes, real Ray."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from commands import Capture, printed, refused
from local_runs import train
from run_process import EVERY_THIRD, interrupt, start, used_by, wait_for_step, wait_until, wait_until_gone
from small_run import QUICKSTART, SMALL
from test_controller import assert_same_run

from grpo_ray.config.loading import load_config
from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.tools.audit.audit import audit

pytestmark = pytest.mark.usefixtures("model_cache")
JOIN = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False); print(ray.cluster_resources())"
OTHER_TOKEN = "0" * 64


def join(children: list[psutil.Process]) -> list[subprocess.Popen[str]]:
    """Join the run's Ray as other processes of this machine: with its token, with another, and without one."""
    arguments = [argument for child in children for argument in child.cmdline()]
    (address,) = {each.partition("=")[2] for each in arguments if each.startswith("--gcs-address=")}
    (token,) = {child.environ().get("RAY_AUTH_TOKEN") for child in children} - {None}
    assert not any(token in argument for argument in arguments)
    credentials = [{"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": each} for each in (token, OTHER_TOKEN)]
    return [
        subprocess.Popen(
            [sys.executable, "-c", JOIN, address],
            env={**os.environ, "RAY_NUM_REDIS_GET_RETRIES": "2", **each},
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        for each in (*credentials, {"RAY_AUTH_MODE": "disabled"})
    ]  # fmt: skip


@pytest.mark.ray
@pytest.mark.usefixtures("any_reward")
def test_a_synchronous_run_that_is_killed_and_interrupted_equals_one_that_was_not(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, optimizer and every figure agree to the last bit; no process and no shared memory is left.

    The uninterrupted run has its actors in this process, and so have the last steps of the other. While that
    one lives, its folder takes no second process, its Ray no stranger, and its processes have no secret.
    """
    folder, exact = tmp_path / "run", ["weight_sync.max_lag=0", "algorithm.num_steps=10"]
    monkeypatch.setenv("WANDB_API_KEY", "not-for-actors")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text(OTHER_TOKEN)  # Ray reads it when it is imported
    process = start(folder, *exact, "learner.slowdown_s=2")
    wait_for_step(process, folder, 1)
    joining = join(used_by(process)[0])
    wait_for_step(process, folder, 3)
    children, shared_memory = used_by(process)
    assert len(children) > 5  # raylet, and an actor each
    assert not [child for child in children if "WANDB_API_KEY" in child.environ()]
    assert f"another process (pid {process.pid} on host" in refused(capsys, "resume", folder)
    assert ["CPU" in each.communicate(timeout=600)[0] for each in joining] == [True, False, False]
    assert [each.returncode == 0 for each in joining] == [True, False, False]
    process.kill()
    process.wait()
    assert wait_until_gone(children) == []
    assert not [path for path in shared_memory if os.path.exists(path)]
    assert 3 <= len(read_metrics(folder / "metrics.jsonl")) < 10

    again = start(folder, *exact, "learner.slowdown_s=0.5", "run.if_exists=resume")  # as a scheduler submits it
    wait_for_step(again, folder, 6)
    interrupt(again, folder)
    assert 6 <= len(read_metrics(folder / "metrics.jsonl")) < 10

    run, whole = RunDirectory(folder), RunDirectory(tmp_path / "whole")
    for each in (whole, run):
        train(load_config(QUICKSTART, [*SMALL, EVERY_THIRD, *exact]), each.path)
    assert any(row["optim/grad_norm"] > 0 for row in read_metrics(whole.metrics_path))
    assert_same_run(whole, run)
    assert audit(run).problems == []
    assert not [file for file in folder.rglob("*") if file.is_file() and b"not-for-actors" in file.read_bytes()]

    last = printed(capsys, "resume", folder).splitlines()[-5:]
    assert last[0] == "All 10 steps are done. Next:"
    assert f"resume {folder} algorithm.num_steps=20" in last[-1]


@pytest.mark.ray
@pytest.mark.campaign
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
    outputs = {name: process.communicate(timeout=600)[0] for name, process in processes.items()}
    assert processes["deadline"].returncode == 130, outputs["deadline"]
    assert "no checkpoint could be written in 1 s" in outputs["deadline"]
    assert processes["twice"].returncode != 0
    assert wait_until_gone(children) == []
