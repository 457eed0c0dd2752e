"""Checkpoints on disk are whole or absent, whatever happens while they are written."""

import errno
import json
import math
import os
import re
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from run_process import output_of
from safetensors.numpy import save

from grpo_ray.config.run import CheckpointConfig
from grpo_ray.errors import RunError
from grpo_ray.records import checkpoint
from grpo_ray.records.checkpoint import Checkpoint, CheckpointState, CheckpointStore, read_checkpoint
from grpo_ray.records.run_files import RunDirectory

WEIGHTS = save({"weights": np.zeros(2, "<f4")})


def make_store(folder: Path, keep: int = 2, keep_best: bool = True) -> CheckpointStore:
    folder.mkdir(exist_ok=True)
    return CheckpointStore(RunDirectory(folder), CheckpointConfig(keep=keep, keep_best=keep_best))


def make_state(step: int, mark: float = 0.0) -> CheckpointState:
    return CheckpointState(step, {"next_group_id": step, "waiting": [1, 2]}, {"reward/mean": 0.5, "mark": mark})


def write(store: CheckpointStore, step: int, mark: float = 0.0) -> Checkpoint:
    """Write a checkpoint with small files in place of the real ones."""
    folder = store.begin(step)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    (folder / "training" / "optimizer.safetensors").write_bytes(save({"moments": np.zeros(20, "<f4")}))
    (folder / "training" / "groups.parquet").write_bytes(b"groups")
    reported = {str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*.*")}
    return store.commit(step, make_state(step, mark), reported)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / "checkpoints"))


def evaluated(folder: Path, rewards: dict[int, float]) -> None:
    write_summary(folder, *(json.dumps({"step": step, "reward": reward}) for step, reward in rewards.items()))


def write_summary(folder: Path, *lines: str) -> None:
    path = RunDirectory(folder).evaluations_summary_path
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


def test_committed_checkpoint_is_found(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    folder = store.begin(40)
    assert re.fullmatch(r"unfinished-step-000040-[0-9a-f]{8}", folder.name)
    assert folder.parent == tmp_path / "checkpoints"
    assert (folder / "training").is_dir()
    assert store.latest() is None
    written = write(store, 40)
    found = make_store(tmp_path).latest()
    assert found == written
    assert found.path == tmp_path / "checkpoints" / "step-000040"
    assert found.training_path == found.path / "training"
    assert (found.training_path / "groups.parquet").read_bytes() == b"groups"
    assert found.state == make_state(40)
    assert names(tmp_path) == ["step-000040"]
    assert json.loads((found.training_path / "state.json").read_text())["files"] == {
        "config.json": 2, "model.safetensors": 80,
        "training/groups.parquet": 6, "training/optimizer.safetensors": 152,
    }  # fmt: skip


def test_numbers_that_json_cannot_hold(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.begin(1)
    metrics = {"loss/policy": math.nan, "optim/grad_norm": math.inf, "reward/mean": np.float32(0.25)}
    written = store.commit(1, CheckpointState(1, {}, metrics), {})
    text = (written.training_path / "state.json").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    found = str(read_checkpoint(written.path).state.metrics)
    assert found == "{'loss/policy': nan, 'optim/grad_norm': nan, 'reward/mean': 0.25}"


def test_leftovers_are_removed(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    first = store.begin(20)
    (first / "model.safetensors").write_bytes(b"half")
    folder = store.begin(20)
    assert first != folder
    assert names(tmp_path) == [folder.name]
    assert os.listdir(folder) == ["training"]
    (tmp_path / "checkpoints" / "unfinished-step-000030").mkdir()  # as earlier versions named it
    folder = store.begin(40)  # leftovers of a failed one are deleted
    assert names(tmp_path) == [folder.name]
    store.discard_unfinished()
    assert names(tmp_path) == []


@pytest.mark.slow
def test_only_the_reported_bytes_become_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another node's file may be hidden or shorter for a while; then the checkpoint waits for it."""
    store = make_store(tmp_path)
    monkeypatch.setattr("grpo_ray.records.checkpoint.VISIBLE_S", 0.3)
    for size in (None, 5):
        file = store.begin(1) / "model.safetensors"
        if size is not None:
            file.write_bytes(b"x" * size)
        with pytest.raises(OSError, match=f"its writer reports 9 bytes, but this machine sees {size or 0}"):
            store.commit(1, make_state(1), {file.name: 9})
    assert store.latest() is None

    monkeypatch.setattr("grpo_ray.records.checkpoint.VISIBLE_S", 30.0)
    cut_off = store.begin(1)
    folder = store.begin(1)
    cut_off.mkdir()  # by an actor of the first attempt, which still writes
    (cut_off / file.name).write_bytes(b"old")
    late = threading.Timer(0.3, lambda: (folder / file.name).write_bytes(b"x" * 9))
    late.start()
    written = store.commit(1, make_state(1), {file.name: 9})
    late.join()
    assert (written.path / file.name).read_bytes() == b"x" * 9
    assert json.loads((written.training_path / "state.json").read_text())["files"] == {file.name: 9}


def test_damaged_checkpoints_are_skipped_and_named(tmp_path: Path) -> None:
    store = make_store(tmp_path, keep=9)
    written = {step: write(store, step) for step in range(1, 8)}
    (written[7].training_path / "state.json").unlink()
    (written[6].training_path / "state.json").write_text('{"step": 6, "led')
    (written[5].path / "model.safetensors").write_bytes(b"weights" * 9)
    (written[4].training_path / "groups.parquet").unlink()
    state = written[3].training_path / "state.json"
    state.write_text(state.read_text().replace('"ledger"', '"leger"').replace('"seal"', '"sea"'))
    written[2].path.rename(written[2].path.with_name("step-000012"))
    for _ in range(2):  # the reasons are not accumulated
        assert store.latest() == written[1]
        told = [line.removeprefix(f"{tmp_path}/checkpoints/").partition("Error")[0] for line in store.damaged]
        assert told == [
            "step-000012: training/state.json is of step 2",
            "step-000007: training/state.json is not readable (FileNotFound",
            "step-000006: training/state.json is not readable (JSONDecode",
            "step-000005: model.safetensors has 63 bytes instead of 80",
            "step-000004: training/groups.parquet is missing",
            "step-000003: training/state.json is not readable (Key",
        ]
    assert "KeyError('ledger')" in store.damaged[5]


@pytest.mark.parametrize(
    ("name", "begin", "checksum_bytes"),
    [
        ("model.safetensors", b"\xff" * 6, 0),  # no length that fits
        ("training/optimizer.safetensors", b"\x09", 0),
        ("model.safetensors", bytes(8), 0),
        ("training/optimizer.safetensors", save({"w": np.zeros(1, "<f4")}), 0),  # of other tensors
        ("model.safetensors", (10).to_bytes(8, "little") + b"[1, 2, 33]", 0),
        ("model.safetensors", WEIGHTS[:-1] + b"x", 1000),  # a header that fits
    ],
)
def test_weights_that_are_damaged_are_not_resumed(
    tmp_path: Path, name: str, begin: bytes, checksum_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size is right; every resume would end with an actor that cannot load them."""
    monkeypatch.setattr(checkpoint, "CHECKSUM_BYTES", checksum_bytes)
    store = make_store(tmp_path, keep=9)
    written = [write(store, step) for step in (1, 2)]
    assert store.latest() == written[1]
    file = written[1].path / name
    file.write_bytes(begin + file.read_bytes()[len(begin) :])
    assert store.latest() == written[0]
    reason = "has changed since it was written" if checksum_bytes else "has a damaged header"
    assert store.damaged == [f"{written[1].path}: {name} {reason}"]


def test_an_invalid_state_is_a_value_error(tmp_path: Path) -> None:
    state = write(make_store(tmp_path), 1).training_path / "state.json"
    no_metrics = '{"step": 1, "ledger": {}, "metrics": null, "files": {}}'
    for text in (state.read_text().replace("1", "2"), "[]", "null", '{"step": 1}', no_metrics, "\0\0\0"):
        state.write_text(text)
        with pytest.raises(ValueError, match=r"state\.json is not readable"):
            read_checkpoint(state.parents[1])


def test_all_are_found_oldest_first_and_a_user_chooses_by_name(tmp_path: Path) -> None:
    store = make_store(tmp_path, keep=9)
    assert store.all() == []
    with pytest.raises(RunError, match=f"^{tmp_path} has no checkpoint yet$"):
        store.choose("last", "--which")
    written = [write(store, step) for step in (1, 2, 3, 4)]
    assert store.all() == written
    with pytest.raises(RunError, match=f"^--which best: no checkpoint of {tmp_path} was validated; give"):
        store.choose("best", "--which")
    evaluated(tmp_path, {1: 0.7, 2: 0.9, 3: 0.7, 4: 0.2, 9: 1.0})
    for choice, number in {"last": 3, "best": 1, "step-000001": 0, "step-000002": 1}.items():
        assert store.choose(choice, "--which") == written[number]
    (written[1].path / "config.json").unlink()
    assert store.choose("best", "--which") == written[2]  # the newest of equals
    assert store.damaged == [f"{written[1].path}: config.json is missing"]
    assert store.all() == [written[0], *written[2:]]
    there = "last, best, none, or one of: step-000001, step-000003, step-000004"
    with pytest.raises(RunError, match=f"^--which: {tmp_path} has no checkpoint 'step-3'; give {there}$"):
        store.choose("step-3", "--which", ["none"])


def test_of_many_checkpoints_the_chosen_one_is_read_and_a_damaged_one_passed_over(tmp_path: Path) -> None:
    store = make_store(tmp_path, keep=9)
    first, second, third = (write(store, step) for step in (1, 2, 3))
    evaluated(tmp_path, {1: 0.1, 2: 0.7, 3: 0.5})
    for damaged in (first, second):  # with the same size
        (damaged.path / "training" / "groups.parquet").write_bytes(b"GROUPS")
    assert store.choose("last", "--which") == third
    assert store.damaged == []
    assert store.choose("best", "--which") == third
    assert [line.partition(":")[0] for line in store.damaged] == [str(second.path)]
    message = f"^--which: {first.path}: .* has no checkpoint 'step-000001'; give last,"
    with pytest.raises(RunError, match=message):
        store.choose("step-000001", "--which")
    (third.path / "training" / "groups.parquet").unlink()
    with pytest.raises(RunError, match=f"^{tmp_path} has no whole checkpoint; {third.path}: .* is missing; "):
        store.choose("last", "--which")


def test_readers_change_nothing(tmp_path: Path) -> None:
    """The run may be between the two renames that replace a checkpoint."""
    write(make_store(tmp_path), 20)
    final = tmp_path / "checkpoints" / "step-000020"
    final.rename(final.with_name("replaced-step-000020"))
    assert make_store(tmp_path).all() == []
    assert names(tmp_path) == ["replaced-step-000020"]


def test_newest_and_on_request_best_are_kept(tmp_path: Path) -> None:
    store = make_store(tmp_path, keep=2)
    evaluated(tmp_path, {0: 9.0, 10: 0.3, 20: 0.8, 25: 2.0, 30: 0.5})  # 0 and 25 have no checkpoint
    for step, kept in {10: [10], 20: [10, 20], 30: [20, 30], 40: [20, 30, 40], 50: [20, 40, 50]}.items():
        write(store, step)
        assert names(tmp_path) == [f"step-{s:06d}" for s in kept]
    evaluated(tmp_path, {20: 0.8, 40: 0.8, 50: 0.1})
    write(store, 60)  # of equals, the newest
    assert names(tmp_path) == ["step-000040", "step-000050", "step-000060"]
    write(make_store(tmp_path, keep=1, keep_best=False), 70)
    assert names(tmp_path) == ["step-000070"]


def test_one_that_cannot_be_read_now_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stale NFS handle costs no checkpoint: no older one is resumed, and none is deleted."""
    store = make_store(tmp_path, keep=1)
    evaluated(tmp_path, {10: 0.9})
    for step in (10, 20):
        write(store, step)
    read = Path.read_text

    def stale(self: Path, **options: str) -> str:
        if self.name == "state.json" and is_stale:
            raise OSError(errno.ESTALE, "Stale file handle")
        return read(self, **options)

    monkeypatch.setattr(Path, "read_text", stale)
    is_stale = True
    with pytest.raises(OSError, match="Stale"):
        store.latest()
    write(store, 30)
    assert store.all() == []
    is_stale = False
    assert names(tmp_path) == ["step-000010", "step-000020", "step-000030"]


def test_one_whose_validation_has_lost_its_line_may_be_the_best(tmp_path: Path) -> None:
    store = make_store(tmp_path, keep=1)
    evaluated(tmp_path, {20: 0.1})
    for step in (10, 20):
        (tmp_path / "evaluations" / f"step-{step:06d}.parquet").touch()
    for step in (10, 20, 30, 40):
        write(store, step)
    assert names(tmp_path) == ["step-000010", "step-000020", "step-000040"]


def test_a_run_that_was_moved_away_gets_no_second_folder(tmp_path: Path) -> None:
    store = make_store(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError):
        store.begin(10)
    assert [path.name for path in tmp_path.iterdir()] == ["moved"]


def test_a_damaged_evaluation_costs_only_itself(tmp_path: Path) -> None:
    """Pruning goes on, and the best of the evaluations that can be read is kept."""
    store = make_store(tmp_path, keep=1)
    write_summary(tmp_path, '{"step": 5, "reward": 0.5}', '{"step": 10, "rew', '{"step": 20, "reward": 0.2}')
    for step in (5, 10, 20, 30):
        write(store, step)
    assert names(tmp_path) == ["step-000005", "step-000030"]
    write_summary(tmp_path, '{"step": 10}', '{"step": 20, "reward": null}')
    write(store, 30)  # without a reward there is no best one
    assert names(tmp_path) == ["step-000030"]


def test_the_checkpoint_that_a_resume_started_from_is_kept(tmp_path: Path) -> None:
    """Restarted engines load from its folder."""
    written = [write(make_store(tmp_path, keep=9), step) for step in (10, 20, 30)]
    (written[2].path / "config.json").unlink()
    resumed = make_store(tmp_path, keep=1)
    assert resumed.latest() == written[1]
    write(resumed, 25)
    # 30 is damaged and does not count as the newest; it stays until the run reaches step 30 again
    assert names(tmp_path) == ["step-000020", "step-000025", "step-000030"]
    write(resumed, 30)
    assert names(tmp_path) == ["step-000020", "step-000030"]
    newest = write(resumed, 35)
    assert names(tmp_path) == ["step-000020", "step-000035"]
    assert make_store(tmp_path).latest() == newest


def test_older_damaged_checkpoints_are_deleted_and_other_folders_left_alone(tmp_path: Path) -> None:
    store = make_store(tmp_path, keep=2)
    for step in (10, 20):
        written = write(store, step)
    (written.path / "config.json").unlink()
    for name in ("step-000020-mine", "best", "unfinished-thoughts"):
        (tmp_path / "checkpoints" / name).mkdir()
    (tmp_path / "checkpoints" / "step-000005").write_text("a file")
    write(store, 30)
    left = ["best", "step-000005", "step-000010", "step-000020-mine", "step-000030", "unfinished-thoughts"]
    assert names(tmp_path) == left


def test_a_failed_deletion_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path, keep=1)
    write(store, 10)
    rename = Path.rename

    def stubborn(path: Path, target: Path) -> Path:
        if target.name.startswith("discarded-"):
            raise OSError("device or resource busy")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", stubborn)
    write(store, 20)
    assert names(tmp_path) == ["step-000010", "step-000020"]
    monkeypatch.undo()
    monkeypatch.setattr("os.unlink", lambda *_, **__: (_ for _ in ()).throw(OSError("busy")))
    write(store, 30)  # renamed but not deleted: a partial checkpoint must not look whole
    assert names(tmp_path) == ["discarded-step-000010", "discarded-step-000020", "step-000030"]
    monkeypatch.undo()
    write(store, 40)
    assert names(tmp_path) == ["step-000040"]


def test_a_full_disk_leaves_the_previous_checkpoint_and_the_next_succeeds(tmp_path: Path) -> None:
    from builders import file_size_limit  # which imports torch: other processes here import this file

    store = make_store(tmp_path)
    written = write(store, 20)
    store.begin(40)
    with file_size_limit(30), pytest.raises(OSError, match="File too large"):
        store.commit(40, make_state(40), {})
    assert (store.latest(), store.damaged) == (written, [])
    write(store, 60)
    assert names(tmp_path) == ["step-000020", "step-000060"]


KILL_EVERYWHERE = """
import itertools, os, shutil, signal, sys
from pathlib import Path
sys.path[:0] = ["tests", "tests/records"]
from test_checkpoint import WEIGHTS, make_store, names, write

root = Path(sys.argv[1])
EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"}

def killed_at(number, folder):
    count = 0
    def hook(event, args):
        nonlocal count
        if event in EVENTS and str(folder) in str(args[0]) or event == "os.rmdir" or event == "os.remove":
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

for second, number in itertools.product((40, 20), range(1, 1000)):
    if number == 1:
        was_killed = True
    elif not was_killed:
        continue
    folder = root / f"{second}-{number}"
    write(make_store(folder, keep=1), 20, mark=1)
    child = os.fork()
    if child == 0:
        killed_at(number, folder)
        write(make_store(folder, keep=1), second, mark=2)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    store = make_store(folder, keep=1)
    found = store.latest()
    left = names(folder)
    was_killed = os.WIFSIGNALED(status)
    print(second, found.state.step, int(found.state.metrics["mark"]), len(store.damaged), was_killed)
    assert (found.path / "model.safetensors").read_bytes() == WEIGHTS
    write(make_store(folder, keep=1), 99)
    assert names(folder) == ["step-000099"], (left, names(folder))
    shutil.rmtree(folder)
"""


@pytest.mark.slow
def test_killed_before_any_file_operation() -> None:
    """Kill with -9 before each file operation that writes checkpoint 40 and deletes 20, or replaces 20."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # in memory: nothing waits for a disk
        output = output_of(sys.executable, "-c", KILL_EVERYWHERE, folder)
    for second in ("40", "20"):
        rows = [row for line in output.splitlines() if (row := line.split())[0] == second]
        assert len(rows) > 25
        old, new = [second, "20", "1", "0"], [second, second, "2", "0"]
        outcomes = [row[:4] for row in rows]
        num_old = outcomes.count(old)
        assert outcomes == [old] * num_old + [new] * (len(rows) - num_old)  # never anything in between
        assert num_old > 15
        assert len(rows) - num_old > 5
        assert [row[4] for row in rows] == ["True"] * (len(rows) - 1) + ["False"]
