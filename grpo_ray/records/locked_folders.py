"""Temporary folders that are locked while their process lives, and removed by the next one if it was killed.

A lock, unlike a pid, is also seen from another container that shares the folder's file system.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path


def make_locked(prefix: str, parent: str) -> tuple[str, int]:
    """Make a folder in `parent`, and remove those without a lock; return it, and the file that locks it."""
    remove_abandoned(prefix, parent)
    while True:
        folder = tempfile.mkdtemp(prefix=prefix, dir=parent)
        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.path.exists(folder):  # or else another process removed it before it was locked
            return folder, descriptor
        os.close(descriptor)


def remove_abandoned(prefix: str, parent: str) -> None:
    """Remove this user's folders with that prefix in `parent` that no living process has locked."""
    for folder in Path(parent).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # it is locked, no folder, or another process was faster
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_uid == os.getuid():
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
