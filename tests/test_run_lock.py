"""Locks on file systems that have none, and second writers where they reach one machine only."""

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
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


@pytest.mark.slow
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


@pytest.mark.usefixtures("no_flock")
@pytest.mark.parametrize("moment", [0, 1, 2])
def test_without_flock_several_that_take_over_at_once_leave_one_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """The second and third process start while the first takes over, after it has read `moment` files."""
    run, lock, others = RunDirectory(tmp_path / "run"), tmp_path / "run" / ".lock", ["second", "third"]
    leave_writer(run)
    own, read, names, num_reads = run_lock._identity(), run_lock._holder, ["first"], 0
    monkeypatch.setattr(run_lock, "_identity", lambda: {**own, "name": names[-1]})
    writers: list[str] = []

    def enter(name: str) -> None:
        names.append(name)
        with suppress(RunError):
            stack.enter_context(run_lock._named_writer(lock.with_name(".lock.writer"), run.path))
            writers.append(name)
        names.pop()

    def interleaved(path: Path) -> dict[str, Any]:
        nonlocal num_reads
        holder = read(path)
        if names == ["first"] and others:
            if num_reads >= moment:
                enter(others.pop(0))
            num_reads += 1
        return holder

    monkeypatch.setattr(run_lock, "_holder", interleaved)
    with ExitStack() as stack:
        names.clear()
        names.append("first")
        with suppress(RunError):
            stack.enter_context(run_lock._named_writer(lock.with_name(".lock.writer"), run.path))
            writers.append("first")
        while others:
            enter(others.pop(0))
        assert len(writers) == 1
        assert read(writer_file(run))["name"] == writers[0]


@pytest.mark.usefixtures("no_flock")
def test_without_flock_a_take_over_that_was_killed_is_taken_over(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    leave_writer(run)
    shutil.copy(writer_file(run), run.path / ".lock.writer.next")
    with run.lock():
        assert json.loads(writer_file(run).read_text())["pid"] == os.getpid()
    assert os.listdir(run.path) == [".lock"]


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


# ---- planted links ----


def test_a_lock_that_is_a_link_is_refused_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (tmp_path / ".lock").symlink_to(mine)
    message = r"\.lock cannot be opened \(Too many levels of symbolic links\); remove it"
    with pytest.raises(RunError, match=message):
        run_lock.locked(tmp_path / ".lock", tmp_path).__enter__()
    assert mine.read_text() == "mine"


@pytest.mark.parametrize(
    "name",
    [
        ".lock",
        "metrics.jsonl",
        "timeline.json",
        "rollouts",
        "checkpoints",
        "logs/learner.log",
        "logs/learner.pid",
    ],
)
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
