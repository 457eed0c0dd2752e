"""The log of an actor: all output of its process and of the processes it starts, in a file of bounded size.

Child processes such as vLLM's inherit the file's descriptor and keep it, so they cannot be given another
file. Once the file is too large, its last part is therefore copied to `<name>.log.1`, which replaces the
previous copy, and the file is truncated: every process appends (O_APPEND), and goes on at the new end. Lines
that are written between the copy and the truncation are lost. If a full disk refuses the copy, the file stays
as it is until the next look.
"""

import contextlib
import os
import shutil
import sys
import time
from pathlib import Path
from threading import Thread

from grpo_ray.records.durable import replacing

MAX_BYTES = 16 * 2**20
LOOK_EVERY_S = 5.0


def redirect_output(path: Path) -> None:
    """Append this process's output to the file from now on, and that of its child processes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    Thread(target=_keep_small, args=(path,), name="actor-log", daemon=True).start()


def older(path: Path) -> Path:
    """Return the file that holds the output before that in `path`."""
    return path.with_name(f"{path.name}.1")


def _keep_small(path: Path) -> None:
    while True:
        with contextlib.suppress(OSError):
            shorten(path)
        time.sleep(LOOK_EVERY_S)


def shorten(path: Path) -> None:
    """Move the end of a log that is too large to the older file, and empty the log.

    Raises:
        OSError: the log is as it was.
    """
    size = path.stat().st_size
    if size <= MAX_BYTES:
        return
    copy = replacing(older(path), fsync=False)
    with copy as partial, path.open("rb") as source, partial.open("wb") as target:
        source.seek(size - MAX_BYTES)
        source.readline()  # the rest of a line
        shutil.copyfileobj(source, target)
    os.truncate(path, 0)
