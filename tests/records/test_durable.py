"""Atomic replacement of files."""

import errno
import os
from pathlib import Path

import pytest

from grpo_ray.records.durable import replacing, sync_tree


@pytest.mark.parametrize("fsync", [True, False])
def test_the_old_file_stays_until_the_new_one_is_whole(tmp_path: Path, fsync: bool) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("old")
    with replacing(path, fsync) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == [path.name]


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("old")
    with pytest.raises(OSError, match="No space left"), replacing(path) as partial:
        _write_to_a_full_disk(partial)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == [path.name]
    with pytest.raises(KeyError), replacing(path) as partial:
        raise KeyError(partial.mkdir())
    with pytest.raises(FileNotFoundError), replacing(path):
        pass  # nothing was written
    assert (path.read_text(), os.listdir(tmp_path)) == ("old", [path.name])


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


def _write_to_a_full_disk(path: Path) -> None:
    path.write_text("ne")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
