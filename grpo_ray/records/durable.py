"""Files that survive a power cut: whatever was renamed into place, or synced, is whole and on disk."""

import csv
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def sync(path: Path) -> int:
    """Wait until a file's bytes, or a folder's entries, are on disk; return its size.

    On NFS, opening a file asks the server for its size, which another node may have changed.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def sync_files(paths: Iterable[Path]) -> None:
    """Sync the files that exist, then the folders that name them."""
    files = [path for path in paths if path.exists()]
    for path in files:
        sync(path)
    for folder in {path.parent for path in files}:
        sync(folder)


def sync_tree(folder: Path) -> None:
    """Sync everything in a folder, and the folder itself."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


@contextmanager
def replacing(path: Path, fsync: bool = True) -> Iterator[Path]:
    """Yield a path to write to, which then replaces `path` atomically; an error leaves `path` unchanged.

    A link in the place of either is replaced, and not followed.
    """
    partial = path.with_name(f".{path.name}.partial")  # hidden: no reader's `*.parquet` finds it
    with suppress(IsADirectoryError):  # of a start that was killed, as a file is too
        partial.unlink(missing_ok=True)
    try:
        yield partial
        if fsync:
            sync(partial)
        os.replace(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # of a folder
        with suppress(OSError):  # the first error is the one to report
            partial.unlink(missing_ok=True)
        raise
    if fsync:
        sync(path.parent)


def write_text(path: Path, text: str, fsync: bool = True) -> None:
    """Write a text in UTF-8 that replaces `path`, as `replacing` does."""
    with replacing(path, fsync) as partial:
        partial.write_text(text, encoding="utf-8")


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]], fsync: bool = True) -> None:
    """Write rows, with the columns of the first, in place of `path`; a cell is empty where there is None."""
    with replacing(path, fsync) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
