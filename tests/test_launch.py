"""The launch script, against a real cluster on this machine, with token authentication."""

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest
from small_run import QUICKSTART, SMALL

from grpo_ray.telemetry.run_files import read_metrics

SCRIPT = "launch/ray_job.sh"
RAY = str(Path(sys.executable).with_name("ray"))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture
def cluster_environment(tmp_path):
    """A head node of its own, and the environment that reaches it; ended by its process group."""
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "GRPO_RAY_PYTHON": sys.executable,
        "GRPO_RAY_CACHE": str(tmp_path / "models"),
    }
    dashboard = free_port()
    command = [RAY, "start", "--head", "--block", "--num-cpus=2", "--disable-usage-stats"]
    # Every port its own, so that another cluster on this machine is in nobody's way.
    ports = ["port", "ray-client-server-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port"]
    command += [f"--dashboard-port={dashboard}", *(f"--{port}={free_port()}" for port in ports)]
    # A short path: Ray's sockets live under it, and their names may have 107 characters.
    command += [f"--temp-dir=/tmp/gr{os.getpid()}"]
    head = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    environment["RAY_ADDRESS"] = f"http://127.0.0.1:{dashboard}"
    try:
        wait_for_dashboard(environment)
        yield environment
    finally:
        end_with_children(head)


def end_with_children(process: subprocess.Popen[bytes]) -> None:
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.terminate()
    _, alive = psutil.wait_procs(family, timeout=15)
    for member in alive:
        member.kill()


def wait_for_dashboard(environment: dict[str, str]) -> None:
    request = urllib.request.Request(
        environment["RAY_ADDRESS"] + "/api/version",
        headers={"Authorization": f"Bearer {environment['RAY_AUTH_TOKEN']}"},
    )
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(request, timeout=5):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def submit(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", SCRIPT, *arguments]
    environment = {**environment, "PATH": f"{Path(sys.executable).parent}:{environment['PATH']}"}
    for _ in range(10):
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=180, check=False
        )
        if "No available agent to submit job" not in result.stderr:  # a head node that is still starting
            break
        time.sleep(3)
    return result


@pytest.mark.ray
def test_a_job_runs_on_the_cluster_and_leaves_its_run_directory(cluster_environment, tmp_path):
    overrides = [*SMALL, "algorithm.num_steps=2", f"run.output_dir={tmp_path}", "run.name=job"]
    result = submit(cluster_environment, QUICKSTART, *overrides)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "step    2/2" in result.stdout  # the log was followed
    assert [row["step"] for row in read_metrics(tmp_path / "job" / "metrics.jsonl")] == [1, 2]

    without_token = {**cluster_environment, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    refused = submit(without_token, QUICKSTART, *overrides)
    assert refused.returncode != 0


def test_a_mistake_is_refused_before_anything_is_submitted():
    environment = {**os.environ, "RAY_ADDRESS": "http://127.0.0.1:1"}
    for arguments, message in [
        ([], "launch/ray_job.sh CONFIG"),
        (["configs/none.yaml"], "no file configs/none.yaml"),
        ([QUICKSTART, "learner.lerning_rate=1"], "did you mean learning_rate?"),
    ]:
        result = submit(environment, *arguments)
        assert result.returncode == 2, result.stdout + result.stderr
        assert message in result.stdout + result.stderr
