"""A whole run on real Ray, with tools and a reward that tell the secrets they see."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Joining
from run_process import output_of
from spying_task import DRIVERS, LISTED
from test_episode_combinations import mixture

from grpo_ray.episodes.confinement import SCRATCH
from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.rewards.isolation.landlock import landlock_version

pytestmark = [pytest.mark.ray, pytest.mark.campaign, pytest.mark.usefixtures("model_cache")]


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Return a temporary folder with a path that leaves room for the names of Ray's sockets."""
    folder = Path(tempfile.mkdtemp(prefix="g"))
    yield folder
    shutil.rmtree(folder)


def overrides(run: RunDirectory) -> list[str]:
    graded = {"reward": "spying_task:grade", "secrets": ["GRADER_KEY"]}
    return [
        *mixture("spying_task:spy", graded), "algorithm.num_steps=2", "episodes.confined=true",
        "episodes.secrets=[TOOL_KEY]", f"run.output_dir={run.path.parent}", f"run.name={run.path.name}",
    ]  # fmt: skip


@pytest.mark.parametrize("where", ["own", "joined"])
def test_tools_and_rewards_have_the_secrets_that_are_listed_for_them(
    where: str, run: RunDirectory, short_folder: Path, request: pytest.FixtureRequest
) -> None:
    """The Ray that is joined was started without the driver's secrets, as that of another machine."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.getcwd()])
    command = [sys.executable, "-m", "grpo_ray", "train", "tests/small_episodes.yaml", *overrides(run)]

    def train() -> None:
        environment = {**os.environ, **DRIVERS, "PYTHONPATH": path, "TMPDIR": str(short_folder)}
        output_of(*command, timeout_s=400, env=environment)

    if where == "joined":
        joining: Joining = request.getfixturevalue("joining_ray")
        with joining():
            train()
    else:
        train()
        assert list(short_folder.glob(f"{SCRATCH}*")) == []
    rows = read_metrics(run.metrics_path)
    assert len(rows) == 2
    names = {name for row in rows for name in row if "seen" in name}
    assert names, sorted(rows[0])
    if landlock_version():
        for row in rows:
            assert {row[name] for name in names if name in row} == {LISTED}, row
            assert LISTED <= row["reward/mean/sorting"] <= LISTED + 1
    for file in (file for file in run.path.rglob("*") if file.is_file()):
        content = file.read_bytes()
        assert not [name for name, value in DRIVERS.items() if value.encode() in content], file
