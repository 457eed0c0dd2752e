"""A folder is resumed by the job with its definition, and refuses every other job."""

import json
import os
from pathlib import Path

import pytest

from grpo_ray.errors import RunError
from grpo_ray.records.resumable_folder import Definition, ResumableFolder

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
