"""A folder is resumed by the job with its definition, and refuses every other job."""

import errno
import json
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
from local_runs import Recorder

from grpo_ray.errors import RunError
from grpo_ray.records import run_lock
from grpo_ray.records.checkpoint import CheckpointStore
from grpo_ray.records.durable import replacing, sync_tree
from grpo_ray.records.resumable_folder import Definition, ResumableFolder
from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.watch.run_log import RunLog

DEFINITION = {"seed": 0, "sampling": {"temperature": 1.0, "stop": ["</a>"]}}


def make(path: Path) -> ResumableFolder:
    return ResumableFolder(path, "job.json", "job", "give another --output")


def test_the_same_definition_resumes(tmp_path: Path) -> None:
    folder = make(tmp_path / "far" / "job")
    folder.check(DEFINITION)
    make(tmp_path).check(DEFINITION)
    assert os.listdir(tmp_path) == []  # a check leaves nothing
    with folder.lock():
        folder.claim(DEFINITION)
    assert json.loads(folder.definition_path.read_text()) == DEFINITION
    (folder.path / "results.txt").touch()
    folder.check(DEFINITION)
    folder.claim(DEFINITION)
    folder.check({"seed": 0}, is_partial=True)


def test_another_definition_is_refused_with_every_difference(tmp_path: Path) -> None:
    folder = make(tmp_path / "job")
    folder.claim(DEFINITION)
    before = folder.definition_path.read_bytes()
    with pytest.raises(RunError) as caught:
        folder.claim({"sampling": {"temperature": 0.5, "stop": []}, "limit": "x" * 300})
    first, *differences = str(caught.value).splitlines()
    assert first == f"{folder.path} holds another job; give another --output, or move it away:"
    assert differences[:3] == [
        "  seed: was 0, is not there",
        "  sampling.temperature: was 1.0, is 0.5",
        "  sampling.stop: was </a>, is none",
    ]
    assert differences[3].startswith("  limit: was not there, is ")
    assert len(differences[3]) < 300
    assert folder.definition_path.read_bytes() == before
    with pytest.raises(RunError, match=r"\n  seed: was 0, is 1$"):
        folder.check({"seed": 1}, is_partial=True)


def test_a_custom_comparison(tmp_path: Path) -> None:
    def fewer_seeds(before: Definition, now: Definition) -> list[str]:
        return ["fewer seeds"] if now["seeds"] < before["seeds"] else []

    folder = ResumableFolder(tmp_path / "job", "job.json", "job", "stop", fewer_seeds)
    for seeds in (2, 3):
        folder.claim({"seeds": seeds})
    with pytest.raises(RunError, match=r"holds another job; stop, or move it away:\n  fewer seeds$"):
        folder.check({"seeds": 2})


@pytest.mark.parametrize("text", ["[]", "null", "{", '{"other": 1}'])
def test_a_damaged_definition_is_refused(tmp_path: Path, text: str) -> None:
    folder = ResumableFolder(tmp_path, "job.json", "job", "stop", lambda before, now: [before["seed"]])
    folder.definition_path.write_text(text)
    with pytest.raises(RunError, match=r"job\.json is not readable .*; stop"):
        folder.check(DEFINITION)


def test_a_folder_with_other_contents_is_refused(tmp_path: Path) -> None:
    folder = make(tmp_path)
    for name in (".lock", ".job.json.partial"):  # what a killed start leaves
        (tmp_path / name).touch()
    assert folder.is_free()
    (tmp_path / "logs").mkdir()
    assert not folder.is_free()
    assert folder.is_free(skeleton=[tmp_path / "logs"])
    (tmp_path / "logs" / "notes.txt").touch()
    assert not folder.is_free(skeleton=[tmp_path / "logs"])
    with pytest.raises(RunError, match="is not empty and holds no job; give another --output"):
        folder.claim(DEFINITION)
    assert not folder.definition_path.exists()


def test_a_place_where_nothing_can_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert not make(tmp_path / "file").is_free()
    for path in (tmp_path / "file", tmp_path / "file" / "job", Path("/proc/job")):
        with pytest.raises(RunError, match=rf"^{path} cannot be written \(.*\); give another --output$"):
            make(path).check(DEFINITION)


@pytest.mark.parametrize(
    ("number", "cure"),
    [(errno.ENOLCK, r"; .* no locks: mount it with `-o flock`"), (errno.EIO, "; give another folder")],
)
def test_a_file_system_without_locks_is_refused_with_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, cure: str
) -> None:
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(number, os.strerror(number))))
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


def test_a_run_in_whose_place_another_one_writes_ends_after_the_step(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    log = RunLog(run, Recorder())
    with run.lock():
        for step in (1, 2):
            log.line(step, {})
            log.writer.call("waiting", str).result(5)
            log.show_warnings()
        (run.path / ".lock").unlink()
        (run.path / ".lock").write_text(json.dumps({"pid": 7, "host": "here"}))
        log.line(3, {})
        log.writer.call("waiting", str).result(5)
        with pytest.raises(RunError, match=r"was moved or removed .*; pid 7 on host here writes to a new"):
            log.show_warnings()
        log.event("not_saved", None, "no last checkpoint could be written")
        log.writer.call("waiting", str).result(5)
        assert not run.events_path.exists()
    assert [row["step"] for row in read_metrics(run.metrics_path)] == [1, 2]


def test_a_lock_that_is_a_link_is_refused_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (tmp_path / ".lock").symlink_to(mine)
    message = r"\.lock: Too many levels of symbolic links; make its folder writable, or remove it"
    with pytest.raises(RunError, match=message):
        run_lock.locked(tmp_path / ".lock", tmp_path).__enter__()
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "checkpoints", "logs/learner.log"])
def test_a_run_with_a_link_to_elsewhere_is_refused_by_name(tmp_path: Path, name: str) -> None:
    run = RunDirectory(tmp_path / "run")
    (tmp_path / "mine").mkdir()
    run.logs.mkdir(parents=True)
    link = run.path / name
    for target in (tmp_path / "mine", link):
        link.symlink_to(target)
        with pytest.raises(RunError, match=f"^{link} is a link to {target}, and a run writes"):
            run.lock()
        link.unlink()
    (run.path / "latest").symlink_to("logs")  # of the user's
    (run.trackers / "wandb").mkdir(parents=True)
    (run.trackers / "wandb" / "debug.log").symlink_to(tmp_path / "mine")  # of a tracker's library
    with run.lock():
        pass


@pytest.mark.parametrize("fsync", [True, False])
def test_the_old_file_and_nothing_else_stays_until_the_new_one_is_whole(tmp_path: Path, fsync: bool) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("old")
    for begin in (lambda partial: partial.write_text("ne"), Path.mkdir):
        with pytest.raises(KeyError), replacing(path, fsync) as partial:
            raise KeyError(begin(partial))
        assert (path.read_text(), os.listdir(tmp_path)) == ("old", [path.name])
    with pytest.raises(FileNotFoundError), replacing(path, fsync):
        pass  # nothing was written
    assert (path.read_text(), os.listdir(tmp_path)) == ("old", [path.name])
    with replacing(path, fsync) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
    assert (path.read_text(), os.listdir(tmp_path)) == ("new", [path.name])


@pytest.mark.parametrize("planted", [".page.html.partial", "page.html"])
def test_a_planted_link_is_replaced_and_not_followed(tmp_path: Path, planted: str) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / planted).symlink_to(mine)
    with replacing(folder / "page.html") as partial:
        partial.write_text("new")
    assert mine.read_text() == "mine"
    assert os.listdir(folder) == ["page.html"]
    assert not (folder / "page.html").is_symlink()
    assert (folder / "page.html").read_text() == "new"


def test_a_folder_that_a_killed_start_left_is_the_callers_to_delete(tmp_path: Path) -> None:
    (tmp_path / ".data.partial" / "old").mkdir(parents=True)
    with replacing(tmp_path / "data") as partial:
        (partial / "old").rmdir()
    assert os.listdir(tmp_path) == ["data"]


def test_a_tree_can_be_synced(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").touch()
    sync_tree(tmp_path)
    with pytest.raises(FileNotFoundError):
        sync_tree(tmp_path / "missing")
