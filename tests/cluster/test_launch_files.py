"""The files that start clusters elsewhere, checked against the options of the program and of Ray."""

import os
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import grpo_ray
from grpo_ray.cluster.placement import Node, shortfalls
from grpo_ray.config import Config
from grpo_ray.config.loading import load_config
from grpo_ray.run.signals import CLEAN_UP_S
from grpo_ray.tools.cli import parse

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
SCRIPTS = sorted(LAUNCH.glob("*.sh"))
EIGHT_GPUS = "configs/qwen2.5-math-1.5b-8gpu.yaml"


def version_of(package: str) -> str:
    """Return the version that the GPU install pins."""
    pins = (ROOT / "requirements" / "gpu.txt").read_text()
    (version,) = re.findall(rf"^{package}(?:\[.+\])?==(.+)$", pins, re.M)
    return str(version)


def config_of(command: Iterable[str]) -> Config:
    """Return the configuration that `train` would run with; the file must exist."""
    _, options = parse(list(command))
    return load_config(ROOT / options.config, options.overrides)


def submitted_by(script: str) -> Config:
    """Return the configuration of the cluster page's command with this script, for two nodes of four GPUs."""
    text = re.sub(r"\\\n\s*", "", (ROOT / "docs" / "cluster.md").read_text())
    (command,) = re.findall(rf"^    \S.*{script} ({EIGHT_GPUS} .+)$", text, re.M)
    return config_of(["train", *shlex.split(command, comments=True)])


def start_options() -> set[str]:
    from ray.scripts.scripts import start

    return {name for parameter in start.params for name in parameter.opts}


def options_in(command: str) -> set[str]:
    return set(re.findall(r"(?<=\s)--[a-z-]+", command))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_and_show_their_usage(script: Path) -> None:
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    assert script.stat().st_mode & 0o111
    assert f"launch/{script.name}" in script.read_text().split("set -euo pipefail")[0]


def test_the_pages_submit_what_can_be_submitted() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    text = "\n".join(re.sub(r"\\\n\s*", "", page.read_text()) for page in pages)
    calls = re.findall(r"^    (?:\w+=\S+ )*(?:launch/ray_job\.sh|sbatch .*launch/slurm\.sh) (.+)$", text, re.M)
    calls += re.findall(r"^    grpo-ray submit (configs.+)$", text, re.M)
    assert len(calls) >= 5
    for call in calls:
        _, options = parse(["submit", *shlex.split(call, comments=True)])
        load_config(ROOT / options.config, options.overrides)


def manifest() -> dict[str, Any]:
    return yaml.safe_load((LAUNCH / "rayjob.yaml").read_text())  # type: ignore[no-any-return]


def trained() -> Config:
    """Return the configuration that the manifest trains, with the files of the repository."""
    words = shlex.split(manifest()["spec"]["entrypoint"].replace(f"{workdir()}/", ""))
    assert words[:3] == ["python", "-m", "grpo_ray"]
    return config_of(words[3:])


def workdir() -> str:
    (folder,) = re.findall(r"^WORKDIR (.+)$", (LAUNCH / "Dockerfile").read_text(), re.M)
    return str(folder)


def pods() -> Iterator[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """Give each group of the manifest's cluster, the head first: (group, its pods' spec, their container)."""
    cluster = manifest()["spec"]["rayClusterSpec"]
    for group in ({"replicas": 1, **cluster["headGroupSpec"]}, *cluster["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        yield group, group["template"]["spec"], container


@pytest.mark.slow
def test_the_rayjob_trains_what_its_pods_have_room_for() -> None:
    config, nodes = trained(), []
    for group, _, container in pods():
        limits, given = container["resources"]["limits"], group["rayStartParams"]
        gpus = float(given.get("num-gpus", limits.get("nvidia.com/gpu", 0)))
        node = Node("pod", {"CPU": float(given.get("num-cpus", limits["cpu"])), "GPU": gpus})
        nodes += group["replicas"] * [node]
        assert {f"--{name}" for name in given} <= start_options()
    assert shortfalls(config, nodes) == []
    assert shortfalls(config, nodes[:-1]) != []  # and no more than that
    assert config.run.if_exists == "resume"
    assert config.run.name is not None


def test_all_pods_share_the_folder_that_the_run_is_in() -> None:
    config = trained()
    for _, spec, container in pods():
        places = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert Path(config.run.output_dir).is_relative_to("/shared")
        (volume,) = [volume for volume in spec["volumes"] if volume["name"] == places["/shared"]]
        assert volume["persistentVolumeClaim"] == {"claimName": "grpo-ray"}


def test_the_image_has_the_pinned_versions() -> None:
    dockerfile = (LAUNCH / "Dockerfile").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tag = f"grpo-ray:{grpo_ray.__version__}"
    assert f"-t {tag} ." in dockerfile
    assert f"FROM rayproject/ray:{version_of('ray')}-py311-gpu" in dockerfile
    assert manifest()["spec"]["rayClusterSpec"]["rayVersion"] == version_of("ray")
    for _, _, container in pods():
        assert (container["image"], container["workingDir"]) == (tag, workdir())
    lines = re.findall(r"^COPY --chown=\S+ (.+) \S+$", dockerfile, re.M)
    copied = [name for line in lines for name in line.split()]
    assert {"grpo_ray", "configs", "requirements", project["readme"]} <= set(copied)
    assert all((ROOT / name).exists() for name in copied)


def test_the_autoscalers_file_fits_rays_schema_and_the_job() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    cluster = yaml.safe_load((LAUNCH / "cluster.yaml").read_text())
    validate_config(prepare_config(cluster))
    assert cluster["docker"]["image"] == f"rayproject/ray:{version_of('ray')}-py311-gpu"

    types = cluster["available_node_types"]
    head, worker = types[cluster["head_node_type"]], types["worker"]
    nodes = [Node("head", head["resources"])] + worker["max_workers"] * [Node("worker", worker["resources"])]
    assert worker["max_workers"] <= cluster["max_workers"]
    assert shortfalls(submitted_by("launch/ray_job.sh"), nodes) == []

    with pytest.raises(Exception, match="max_wurkers"):  # the schema would find a mistake
        validate_config(prepare_config({**cluster, "max_wurkers": 1}))


def test_a_job_that_brings_nodes_up_waits_for_them() -> None:
    assert trained().placement.wait_s > 0
    header = (LAUNCH / "cluster.yaml").read_text().split("cluster_name:")[0]
    page = (ROOT / "docs" / "cluster.md").read_text().split("## AWS")[1].split("## Kubernetes")[0]
    for text in (header, page.replace("\\\n", " ")):
        (call,) = re.findall(r"launch/ray_job\.sh (.+)$", text, re.M)
        assert config_of(["submit", *shlex.split(call.replace("CONFIG", EIGHT_GPUS))]).placement.wait_s > 0


def test_the_autoscalers_commands() -> None:
    cluster = yaml.safe_load((LAUNCH / "cluster.yaml").read_text())
    (home,) = (remote for remote, local in cluster["file_mounts"].items() if local == ".")
    assert home == "/home/ray/grpo_ray"  # ~/grpo_ray in the image
    starts = [cluster[f"{kind}_start_ray_commands"][1] for kind in ("head", "worker")]
    for command, script in zip(starts, ("start_head.sh", "join.sh"), strict=True):
        assert shlex.split(command)[:2] == ["bash", f"~/grpo_ray/launch/{script}"]
        assert options_in(command) <= start_options()
    assert "--port=6379" in starts[0]
    assert "$RAY_HEAD_IP:6379" in starts[1]
    for command in cluster["setup_commands"]:
        for name in re.findall(r"-r (\S+)", command):
            assert (ROOT / name).exists()


FAKES = {
    # Logs the program that it is asked to run, and where; the step lives until it is ended, as on a node.
    "srun": """#!/bin/bash
options=()
while [[ $1 == --* ]]; do options+=("$1"); shift; done
case $1 in
  hostname) echo "10.0.0.1 fe80::1" ;;
  rm) echo "removed|${options[*]}" >>calls; exec "$@" ;;
  bash)  # a step that makes the job's folder first, on another node: there it does not exist yet
    rmdir "$4"
    "${@:1:4}" true && echo "folder|$(stat -c %a "$4")" >>calls
    echo "step|${options[*]}|${*:5}|$RAY_AUTH_MODE ${#RAY_AUTH_TOKEN}" >>calls; exec sleep 60 ;;
  *) echo "step|${options[*]}|$*|$RAY_AUTH_MODE ${#RAY_AUTH_TOKEN}" >>calls; exec sleep 60 ;;
esac
""",
    "scontrol": """#!/bin/bash
echo "scontrol|$*" >>calls
if [[ $1 == show ]]; then printf "%s\\n" node-a node-b node-c; fi
""",
    "ray": '#!/bin/bash\necho "ray|$*" >>calls\n',
    "grpo-ray": """#!/bin/bash
echo "grpo-ray|$RAY_ADDRESS|$*" >>calls
if [[ $1 == train ]]; then
  until [[ $(grep -c ^step calls) == 2 ]]; do sleep 0.02; done  # the nodes start in parallel
fi
if [[ $1 == train && -n $FAKE_SIGNAL ]]; then
  trap 'echo checkpoint >>calls; exit 130' TERM
  kill "-$FAKE_SIGNAL" $PPID
  for _ in {1..50}; do sleep 0.1; done
fi
""",
}
Slurm = Callable[..., tuple[int, list[list[str]]]]


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    """`slurm(*arguments, signal="")`: run the script; return its exit status and its calls."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in FAKES.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    shutil.copytree(LAUNCH, tmp_path / "launch")

    def run(*arguments: str, signal: str = "") -> tuple[int, list[list[str]]]:
        environment = {
            "PATH": f"{programs}:{Path(shutil.which('python') or '').parent}:/usr/bin:/bin",
            "SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "node-[a-c]", "SLURM_SUBMIT_DIR": str(tmp_path),
            "SLURM_CPUS_PER_TASK": "32", "SLURM_GPUS_ON_NODE": "4", "FAKE_SIGNAL": signal,
        }  # fmt: skip
        command = ["bash", LAUNCH / "slurm.sh", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, timeout=600)
        calls = (tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").exists() else []
        return done.returncode, [line.split("|") for line in calls]

    return run


@pytest.mark.slow
def test_slurm_starts_a_head_and_the_other_nodes_and_trains(slurm: Slurm, tmp_path: Path) -> None:
    assert slurm() == (2, [])  # without a configuration
    status, calls = slurm(EIGHT_GPUS, "algorithm.num_steps=3")
    assert status == 0
    head, others = sorted((call for call in calls if call[0] == "step"), key=lambda call: "join" in call[2])
    address = "10.0.0.1:33824"  # 20000 + 3456 x 4: the job's own
    assert head[1] == "--overlap --nodes=1 --ntasks=1 --nodelist=node-a"
    assert others[1] == "--overlap --nodes=2 --ntasks=2 --exclude=node-a"
    assert head[2].startswith("launch/start_head.sh --block --node-ip-address=10.0.0.1 --port=33824 ")
    assert others[2].startswith(f"launch/join.sh {address} --block ")
    for step in (head, others):
        assert {"--num-cpus=32", "--num-gpus=4"} <= set(step[2].split())
        assert options_in(step[2]) <= start_options()
        assert step[3] == "token 64"  # all have the job's own token

    assert ["folder", "700"] in calls
    temp_dirs = {word for step in (head, others) for word in step[2].split() if word.startswith("--temp-dir=")}
    (temp_dir,) = temp_dirs  # one for all steps
    assert re.fullmatch(r"--temp-dir=/tmp/grpo_ray-\w{10}/ray", temp_dir)
    assert ["removed", "--overlap --nodes=3 --ntasks=3"] in calls
    assert not Path(temp_dir.removeprefix("--temp-dir=")).parent.exists()

    (check, train) = [call for call in calls if call[0] == "grpo-ray"]
    assert check[2] == f"check {EIGHT_GPUS} algorithm.num_steps=3"
    assert train[1] == address
    config = config_of(shlex.split(train[2]))
    assert (config.run.name, config.run.if_exists) == ("slurm-123456", "resume")
    assert config.algorithm.num_steps == 3
    assert not any(call[:2] == ["scontrol", "requeue 123456"] for call in calls)

    shutil.rmtree(tmp_path / "launch")
    assert slurm(EIGHT_GPUS) == (2, calls)  # without its scripts, it calls nothing


@pytest.mark.slow
@pytest.mark.parametrize(("signal", "is_requeued"), [("USR1", True), ("TERM", False)])
def test_slurm_ends_with_a_checkpoint(slurm: Slurm, signal: str, is_requeued: bool) -> None:
    status, calls = slurm(EIGHT_GPUS, signal=signal)
    assert status == 130
    assert ["checkpoint"] in calls
    assert (["scontrol", "requeue 123456"] in calls) == is_requeued


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_slurm_joins_from_no_folder_of_another_user(tmp_path: Path) -> None:
    script = re.findall(r"^in_private='(.*)'$", (LAUNCH / "slurm.sh").read_text(), re.M)[0]
    folder, target = tmp_path / "folder", tmp_path / "target"
    target.mkdir()
    for make in (lambda: os.chown(folder.mkdir() or folder, 65534, 65534), lambda: folder.symlink_to(target)):
        make()
        assert subprocess.run(["bash", "-ec", script, folder, "touch", tmp_path / "joined"]).returncode != 0
        assert not (tmp_path / "joined").exists()
        folder.unlink() if folder.is_symlink() else folder.rmdir()


def test_slurm_asks_for_what_the_job_wants_and_stops_it_in_time() -> None:
    text = (LAUNCH / "slurm.sh").read_text()
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)", text, re.M))
    node = Node("node", {"CPU": float(asked["cpus-per-task"]), "GPU": float(asked["gpus-per-node"])})
    assert shortfalls(submitted_by("launch/slurm.sh"), int(asked["nodes"]) * [node]) == []
    assert asked["ntasks-per-node"] == "1"
    (patience_s,) = re.findall(r"run\.on_preemption_s=(\d+)", text)
    assert int(asked["signal"].removeprefix("B:USR1@")) > int(patience_s) + CLEAN_UP_S
