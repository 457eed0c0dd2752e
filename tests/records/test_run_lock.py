"""Locks on file systems that have none, and second writers where they reach one machine only."""

import errno
import json
import os
from pathlib import Path

import pytest

from grpo_ray.errors import RunError
from grpo_ray.records import run_lock
from grpo_ray.records.checkpoint import CheckpointStore
from grpo_ray.records.run_files import RunDirectory


@pytest.mark.parametrize(
    ("number", "cure"),
    [(errno.ENOLCK, r"; .* no locks: mount it with `-o flock`"), (errno.EIO, "; give another folder")],
)
def test_a_file_system_without_locks_is_refused_with_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, cure: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    message = rf"{tmp_path / 'run'} cannot be locked \({os.strerror(number)}\){cure}"
    with pytest.raises(RunError, match=message), RunDirectory(tmp_path / "run").lock():
        pass


def test_a_second_writer_on_another_machine_is_noticed_at_the_next_checkpoint(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    store = CheckpointStore(run)
    store.begin(1)  # without a lock there is nothing to compare
    with run.lock():
        store.begin(2)
        (run.path / ".lock").write_text(json.dumps({"pid": 7, "host": "node-b"}))  # its flock was granted there
        with pytest.raises(RunError, match=r"pid 7 on host node-b also writes to .*, because"):
            store.begin(3)


# ---- planted links ----


def test_a_lock_that_is_a_link_is_refused_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (tmp_path / ".lock").symlink_to(mine)
    message = r"\.lock cannot be opened \(Too many levels of symbolic links\); remove it"
    with pytest.raises(RunError, match=message):
        run_lock.locked(tmp_path / ".lock", tmp_path).__enter__()
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "checkpoints", "logs/learner.log"])
def test_a_run_with_a_link_to_elsewhere_is_refused_by_name(tmp_path: Path, name: str) -> None:
    run = RunDirectory(tmp_path / "run")
    (tmp_path / "mine").mkdir()
    run.logs.mkdir(parents=True)
    (run.path / name).symlink_to(tmp_path / "mine")
    with pytest.raises(
        RunError, match=f"^{run.path / name} is a link to {tmp_path / 'mine'}, and a run writes"
    ):
        run.lock()
    (run.path / name).unlink()
    (run.path / "latest").symlink_to("logs")  # of the user's
    (run.trackers / "wandb").mkdir(parents=True)
    (run.trackers / "wandb" / "debug.log").symlink_to(tmp_path / "mine")  # of a tracker's library
    with run.lock():
        pass
