"""Locks on file systems that have none, and second writers where they reach one machine only."""

import errno
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_ray.errors import RunError
from grpo_ray.telemetry import run_lock
from grpo_ray.telemetry.checkpoint import CheckpointStore
from grpo_ray.telemetry.run_files import RunDirectory


@pytest.fixture(params=[errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def no_flock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr("fcntl.flock", refuse)


def writer_file(run: RunDirectory) -> Path:
    return run.path / ".lock.writer"


def leave_writer(run: RunDirectory, **changes: Any) -> None:
    """Write the file of another process: by default one of this machine which has ended."""
    run.path.mkdir()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    own = run_lock._identity()
    writer_file(run).write_text(json.dumps({**own, "pid": ended.pid, "started": 1, **changes}))


@pytest.mark.usefixtures("no_flock")
def test_without_flock_a_file_names_the_writer(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    with run.lock():
        assert json.loads(writer_file(run).read_text())["pid"] == os.getpid()
        message = (
            rf"pid {os.getpid()} on host {socket.gethostname()}\) writes to {run.path}; .* delete .*writer"
        )
        with pytest.raises(RunError, match=message), run.lock():
            pass
        if (child := os.fork()) == 0:  # a forked child does not release its parent's lock
            os._exit(0 if writer_file(run).exists() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not writer_file(run).exists()
    with run.lock():
        pass


@pytest.mark.usefixtures("no_flock")
def test_without_flock_a_process_of_this_machine_that_ended_is_replaced(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    leave_writer(run)
    with run.lock():
        assert json.loads(writer_file(run).read_text())["pid"] == os.getpid()
    assert os.listdir(run.path) == [".lock"]


@pytest.mark.usefixtures("no_flock")
@pytest.mark.parametrize("changes", [{"machine": "another boot"}, {"pid": os.getpid(), "started": None}, None])
def test_without_flock_a_writer_that_may_be_alive_is_not_replaced(
    tmp_path: Path, changes: dict[str, Any] | None
) -> None:
    run = RunDirectory(tmp_path / "run")
    leave_writer(run, **(changes or {}))
    if changes is None:
        writer_file(run).write_text("")  # created, and not written yet
    elif "pid" in changes:
        leave = {**run_lock._identity()}
        writer_file(run).write_text(json.dumps(leave))  # this process, which is alive
    before = writer_file(run).read_text()
    with pytest.raises(RunError, match=f"delete {writer_file(run)}"), run.lock():
        pass
    assert writer_file(run).read_text() == before


def test_another_error_of_the_lock_is_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(RunError, match=r"cannot be locked \(Input/output error\)"):
        RunDirectory(tmp_path / "run").lock().__enter__()


def test_a_second_writer_on_another_machine_is_noticed_at_the_next_checkpoint(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    store = CheckpointStore(run)
    store.begin(1)  # without a lock there is nothing to compare
    with run.lock():
        store.begin(2)
        (run.path / ".lock").write_text(json.dumps({"pid": 7, "host": "node-b"}))  # its flock was granted there
        with pytest.raises(RunError, match=r"pid 7 on host node-b writes to .* as well"):
            store.begin(3)
