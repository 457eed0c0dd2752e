"""Copies of the repository in which tests run: the repository and the user's caches stay as they are."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
LEFT_OUT = (".git", ".venv", "results", "__pycache__", ".*_cache", ".hypothesis")


@contextmanager
def copied(tree: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """Copy a tree; yield the copy and the environment of its tests. What they write goes at the end."""
    with tempfile.TemporaryDirectory(prefix="m-", ignore_cleanup_errors=True) as name:
        copy, temporary = Path(name) / "tree", Path(name) / "tmp"
        temporary.mkdir()
        shutil.copytree(tree, copy, ignore=_left_out if tree == ROOT else None, symlinks=True)
        profiling = copy / "profiling"
        paths = [str(copy), str(profiling), str(profiling / "mutants"), os.environ.get("PYTHONPATH")]
        environment = {"TMPDIR": str(temporary), "GRPO_RAY_CACHE": str(Path(name) / "models")}
        environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONDONTWRITEBYTECODE": ""}
        yield copy, {**os.environ, **environment}


def _left_out(folder: str, names: list[str]) -> set[str]:
    """Return the names that are not copied; `runs` are those of the repository's root, not of its tests."""
    found = shutil.ignore_patterns(*LEFT_OUT)(folder, names)
    return found | ({"runs"} if Path(folder) == ROOT else set())


def run_tests(
    tree: Path, environment: dict[str, str], *arguments: str, timeout_s: float | None
) -> tuple[int, str]:
    """Return pytest's exit status and output; end it after `timeout_s`, with status -1."""
    with tempfile.TemporaryFile("w+") as output:
        command = [sys.executable, "-m", "pytest", "-q", *arguments]
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = -1
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what its tests have left behind
            process.wait()
        output.seek(0)
        return status, output.read()
