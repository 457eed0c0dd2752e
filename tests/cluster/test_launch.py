"""The launch scripts: a cluster of two nodes on this machine, with token authentication, and a run on both."""

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import pytest
from ray_nodes import free_port, ray_head, ray_node, token_environment
from run_process import wait_until
from small_run import QUICKSTART, SMALL

from grpo_ray.cluster.session import SETTINGS
from grpo_ray.records.rollout_log import read_rollouts
from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.tools.cli import parse

SECRET = {"EXAMPLE_API_KEY": "for the shell that starts the nodes alone"}


@pytest.fixture
def two_nodes(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Start a head node and a second one; gives the environment that reaches them."""
    dashboard = free_port()
    environment = {
        **token_environment(),
        "RAY_ADDRESS": f"http://127.0.0.1:{dashboard}",
        "GRPO_RAY_CACHE": str(tmp_path / "models"),
    }
    of_nodes = {**environment, **SECRET}
    with ray_head(of_nodes, f"--dashboard-port={dashboard}", "--num-cpus=2") as (head, address):
        wait_until(head, lambda: num_alive(environment) == 1)
        with ray_node(["launch/join.sh", address, "--num-cpus=1"], of_nodes) as second:
            wait_until(second, lambda: num_alive(environment) == 2)
            for node in (head, second):
                assert_secret_is_not_inherited(psutil.Process(node.pid))
            yield environment


def assert_secret_is_not_inherited(node: psutil.Process) -> None:
    family = [node, *node.children(recursive=True)]
    assert len(family) > 3  # GCS, dashboard, raylet
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            assert not SECRET.keys() & process.environ().keys(), process


def num_alive(environment: dict[str, str]) -> int:
    """Return the number of nodes; 0 as long as a dashboard that starts, or is busy, gives no answer."""
    with contextlib.suppress(OSError):
        return sum(node["state"] == "ALIVE" for node in state_of(environment, "nodes"))
    return 0


def state_of(environment: dict[str, str], what: str) -> list[dict[str, Any]]:
    """Return Ray's records of its nodes, actors or placement groups, including those that are gone."""
    return ask(environment, f"/api/v0/{what}?detail=1&limit=1000")["data"]["result"]["result"]  # type: ignore[no-any-return]


def ask(environment: dict[str, str], path: str) -> Any:
    headers = {"Authorization": f"Bearer {environment['RAY_AUTH_TOKEN']}"}
    request = urllib.request.Request(environment["RAY_ADDRESS"] + path, headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def submit(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "launch/ray_job.sh", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.ray
def test_a_run_on_two_nodes(two_nodes: dict[str, str], tmp_path: Path) -> None:
    """Each node has a Generator, weights reach the node without the Learner, and nothing stays reserved.

    The Learner has two ranks. The reward is a module of the submitted folder.
    """
    overrides = [
        *SMALL, "learner.num_ranks=2", "generator.num_generators=2", "generator.num_cpus=1",
        "placement.strategy=spread", f"run.output_dir={tmp_path}", "run.name=job", "scorer.num_scorers=2",
        "task.reward=examples.trl_reward.rewards:only_digits",  # a module that travels with the job
    ]  # fmt: skip
    result = submit(two_nodes, QUICKSTART, *overrides)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "step    8/8" in result.stdout  # the log was followed
    run = RunDirectory(tmp_path / "job")
    metrics = read_metrics(run.metrics_path)
    assert [row["step"] for row in metrics] == list(range(1, 9))
    assert max(row["lag/max"] for row in metrics) <= 1

    generators = [a for a in state_of(two_nodes, "actors") if a["class_name"] == "Generator"]
    assert len(generators) == 2
    assert len({actor["node_id"] for actor in generators}) == 2  # both nodes
    versions = defaultdict(set)
    for step in range(1, 9):
        for row in read_rollouts(run.rollouts_path(step)):
            versions[row["generator"]].update(span["version"] for span in row["versions"])
    both = {"generator-0": True, "generator-1": True}
    assert {name: max(seen) > 2 for name, seen in versions.items()} == both

    (group,) = state_of(two_nodes, "placement_groups")
    assert group["state"] == "REMOVED"
    assert len(group["bundles"]) == 2

    unknown = submit(two_nodes, "follow", "job-9")
    assert unknown.returncode == 2
    assert "Job job-9 does not exist" in unknown.stderr

    refused = submit({**two_nodes, "RAY_AUTH_TOKEN": secrets.token_hex(32)}, QUICKSTART, *overrides)
    assert refused.returncode == 2
    assert "refuses this token" in refused.stderr


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
    """Copy the scripts to a folder without an environment, with programs that print how they are called."""
    shutil.copytree("launch", tmp_path / "launch")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {"ray": FAKE_RAY, "grpo-ray": '#!/bin/bash\npwd\nprintf "%s\\n" "$@"\n'}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)

    def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        return subprocess.run(
            ["bash", str(tmp_path / "launch" / script), *arguments],
            env={"PATH": path, "HOME": str(tmp_path), **environment},
            capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip

    return run


def test_ray_job_is_grpo_ray_submit_from_the_folder_above(elsewhere, tmp_path):
    for arguments, submitted in [
        ([QUICKSTART, "run.name=a b"], [QUICKSTART, "run.name=a b"]),
        (["resume", "runs/a", "algorithm.num_steps=3"], ["--resume", "runs/a", "algorithm.num_steps=3"]),
        (["stop", "job-1"], ["--stop", "job-1"]),
        (["follow", "job-1", "--address", "http://h:1"], ["--follow", "job-1", "--address", "http://h:1"]),
    ]:
        result = elsewhere("ray_job.sh", *arguments)
        assert result.stdout.splitlines() == [str(tmp_path), "submit", *submitted]
        parse(["submit", *submitted])  # the program's own options

    usage = elsewhere("ray_job.sh")
    assert usage.returncode == 2
    assert "launch/ray_job.sh CONFIG" in usage.stdout
    assert usage.stdout.endswith("how to stop it.\n")


def test_local_is_grpo_ray_train_without_a_cluster(elsewhere, tmp_path):
    (tmp_path / "bin" / "grpo-ray").write_text('#!/bin/bash\nprintf "%s\\n" "${RAY_ADDRESS-none}" "$@"\n')
    result = elsewhere("local.sh", QUICKSTART, "run.name=a b", RAY_ADDRESS="http://head:8265")
    assert result.stdout.splitlines() == ["none", "train", QUICKSTART, "run.name=a b"]
    parse(["train", QUICKSTART, "run.name=a b"])
    assert elsewhere("local.sh").returncode == 2


@pytest.mark.slow
def test_a_node_joins_with_the_heads_token_only(elsewhere):
    refused = elsewhere("join.sh", "head:6379")
    assert refused.returncode == 2
    assert "no token; copy the head's" in refused.stderr
    with socket.create_server(("127.0.0.1", 0)) as server:
        head = f"127.0.0.1:{server.getsockname()[1]}"
        Thread(target=lambda: server.accept()[0].sendall(bytes((0, 0, 0, SETTINGS, 0, 0, 0, 0, 0)))).start()
        joined = elsewhere("join.sh", head, "--num-cpus=2", "--block", RAY_AUTH_TOKEN="x")
    assert {f"--address={head}", "--num-cpus=2", "mode token"} <= set(joined.stdout.splitlines())
    nowhere = elsewhere("join.sh", head, RAY_AUTH_TOKEN="x")
    assert f"join.sh: no head node answers at {head}: ConnectionRefusedError" in nowhere.stderr


@pytest.mark.slow
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
    assert "which holds no token" in not_there.stderr
