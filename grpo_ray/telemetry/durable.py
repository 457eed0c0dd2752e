"""Files that survive a power cut: whatever was renamed into place is whole and on disk."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Sync everything in a folder, and the folder itself."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


@contextmanager
def replacing(path: Path, fsync: bool = True) -> Iterator[Path]:
    """Yield a path to write to, which then replaces `path` atomically; an error leaves `path` unchanged."""
    partial = path.with_name(f".{path.name}.partial")  # hidden: no reader's `*.parquet` finds it
    try:
        yield partial
        if fsync:
            sync(partial)
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):  # the first error is the one to report
            partial.unlink(missing_ok=True)
        raise
    if fsync:
        sync(path.parent)
