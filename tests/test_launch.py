"""The launch script, against a real cluster on this machine, with token authentication."""

import contextlib
import json
import os
import secrets
import shutil
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
SECRET = {"EXAMPLE_API_KEY": "for the shell that starts the head alone"}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture
def cluster_environment(tmp_path):
    """A head node of its own, and the environment that reaches it; ended by its process group."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "GRPO_RAY_PYTHON": sys.executable,
        "GRPO_RAY_CACHE": str(tmp_path / "models"),
    }
    dashboard = free_port()
    command = ["bash", "launch/start_head.sh", "--block", "--num-cpus=2"]
    # Every port its own, so that another cluster on this machine is in nobody's way.
    ports = ["port", "ray-client-server-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port"]
    command += [f"--dashboard-port={dashboard}", *(f"--{port}={free_port()}" for port in ports)]
    # A short path: Ray's sockets live under it, and their names may have 107 characters.
    command += [f"--temp-dir=/tmp/gr{os.getpid()}"]
    head = subprocess.Popen(
        command, env={**environment, **SECRET}, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    )
    environment["RAY_ADDRESS"] = f"http://127.0.0.1:{dashboard}"
    try:
        wait_for_dashboard(environment)
        assert_nobody_has_the_secret(psutil.Process(head.pid))
        yield environment
    finally:
        end_with_children(head)
        shutil.rmtree(f"/tmp/gr{os.getpid()}", ignore_errors=True)


def end_with_children(process: subprocess.Popen[bytes]) -> None:
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.terminate()
    _, alive = psutil.wait_procs(family, timeout=15)
    for member in alive:
        member.kill()


def assert_nobody_has_the_secret(head: psutil.Process) -> None:
    family = [head, *head.children(recursive=True)]
    assert len(family) > 3  # the head's GCS, dashboard, raylet
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            assert not SECRET.keys() & process.environ().keys(), process


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
        ([QUICKSTART, 'sampling.stop=["</answer>"]'], "would not leave this as it is"),
        ([QUICKSTART, "run.name=$(id)"], "would not leave this as it is"),
        (["resume"], "resume takes a run's folder"),
        (["resume", "runs/none"], "no run in runs/none"),
    ]:
        result = submit(environment, *arguments)
        assert result.returncode == 2, result.stdout + result.stderr
        assert message in result.stdout + result.stderr


FAKE_RAY = r"""#!/bin/bash
printf "%s\n" "$@"
echo "mode ${RAY_AUTH_MODE:-unset}"
case $1 in
  get-auth-token) mkdir -p ~/.ray; echo generated >~/.ray/auth_token ;;
  start) env >&2 ;;
esac
"""


@pytest.fixture
def elsewhere(tmp_path):
    """The scripts in a folder without an environment, and programs that print how they are called."""
    shutil.copytree("launch", tmp_path / "launch")
    shutil.copytree("configs", tmp_path / "configs")
    (tmp_path / "runs" / "a-run").mkdir(parents=True)
    (tmp_path / "runs" / "a-run" / "config.yaml").touch()
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {"ray": FAKE_RAY, "grpo-ray": "#!/bin/bash\n"}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)

    def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        return subprocess.run(
            ["bash", str(tmp_path / "launch" / script), *arguments],
            env={"PATH": path, "HOME": str(tmp_path), **environment},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    return run


def test_what_is_submitted(elsewhere, tmp_path):
    result = elsewhere("ray_job.sh", "resume", "runs/a-run", "algorithm.num_steps=3", EXAMPLE_TOKEN="mine")
    assert result.returncode == 0, result.stderr
    words = result.stdout.splitlines()
    command = words[words.index("--") + 1 : -1]
    run = str(tmp_path / "runs" / "a-run")
    assert command == ["python", "-m", "grpo_ray.cli", "resume", run, "algorithm.num_steps=3"]
    assert words[words.index("--address") + 1] == "http://127.0.0.1:8265"
    runtime_env = json.loads(words[words.index("--runtime-env-json") + 1])
    assert runtime_env.keys() == {"excludes"}  # no variable of this shell
    assert "mine" not in result.stdout

    result = elsewhere("ray_job.sh", QUICKSTART, "run.name=a", "run.if_exists=resume")
    words = result.stdout.splitlines()
    here = f"run.output_dir={tmp_path}/runs"
    assert words[words.index("train") :][:5] == [
        "train",
        QUICKSTART,
        here,
        "run.name=a",
        "run.if_exists=resume",
    ]


def test_without_a_token_nothing_goes_to_another_machine(elsewhere, tmp_path):
    remote = {"RAY_ADDRESS": "http://head.example:8265", "RAY_API_SERVER_ADDRESS": "http://other.example:1"}
    for mode in ({}, {"RAY_AUTH_MODE": "token"}):
        refused = elsewhere("ray_job.sh", QUICKSTART, **remote, **mode)
        assert refused.returncode == 2
        assert "no token for http://head.example:8265" in refused.stderr

    (tmp_path / "token").write_text("x")
    for allowed, mode in [
        ({"RAY_AUTH_TOKEN": "x"}, "token"),
        ({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}, "token"),
        ({"RAY_AUTH_MODE": "disabled"}, "disabled"),
    ]:
        result = elsewhere("ray_job.sh", QUICKSTART, **remote, **allowed)
        assert result.returncode == 0, result.stderr
        words = result.stdout.splitlines()
        assert words[words.index("--address") + 1] == remote["RAY_ADDRESS"]
        assert words[-1] == f"mode {mode}"


def test_a_head_has_a_token_that_only_its_owner_can_read(elsewhere, tmp_path):
    assert elsewhere("start_head.sh", RAY_AUTH_MODE="disabled").returncode == 2
    result = elsewhere("start_head.sh", "--num-cpus=2", "--dashboard-port=1234", EXAMPLE_TOKEN="mine")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600
    assert "generated" not in result.stdout + result.stderr
    assert "mine" not in result.stderr  # what Ray was started with
    assert "RAY_ADDRESS=http://127.0.0.1:1234 launch/ray_job.sh CONFIG" in result.stdout

    blocking = elsewhere("start_head.sh", "--dashboard-host", "10.0.0.1", "--block").stdout.splitlines()
    assert blocking[-1] == "mode token"
    assert {"--dashboard-host=10.0.0.1", "--dashboard-port=8265", "--block"} <= set(blocking)

    not_there = elsewhere("start_head.sh", RAY_AUTH_TOKEN_PATH=str(tmp_path / "none"))
    assert not_there.returncode == 2
    assert "where no token is" in not_there.stderr
