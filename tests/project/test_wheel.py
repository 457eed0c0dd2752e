"""The wheel: all that an installed grpo_ray needs is in it, and nothing else."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of what it is made of."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in ("configs", "examples", "grpo_ray"):
        shutil.copytree(ROOT / folder, source / folder, symlinks=True)
    options = ["-q", "--no-deps", "--no-build-isolation", "-w", built]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, source], check=True)
    (path,) = built.glob("*.whl")
    return path


@pytest.mark.slow
def test_the_wheel_has_the_package_its_configurations_and_its_types(wheel: Path) -> None:
    names = ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"grpo_ray"}
    assert "grpo_ray/py.typed" in names
    for path in CONFIGS:
        assert ZipFile(wheel).read(f"grpo_ray/configs/{path.name}") == path.read_bytes()


@pytest.mark.slow
def test_a_bundled_configuration_is_found_by_name_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    ZipFile(wheel).extractall(tmp_path / "installed")
    (tmp_path / "empty").mkdir()
    checked = subprocess.run(
        [sys.executable, "-m", "grpo_ray", "check", "quickstart"],
        cwd=tmp_path / "empty", env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
        capture_output=True, text=True,
    )  # fmt: skip
    assert checked.stdout.startswith("quickstart: good; "), checked.stdout + checked.stderr
