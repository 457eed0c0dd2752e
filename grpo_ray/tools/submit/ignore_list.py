"""The files that Ray takes from a folder, beside its .gitignore and .rayignore."""

import os
from collections.abc import Sequence
from pathlib import Path

from pathspec import GitIgnoreSpec


def uploaded_files(folder: Path, excludes: Sequence[str]) -> dict[Path, int]:
    """Return the files that Ray uploads from the folder, with their sizes; it does not compress them."""
    names = [".gitignore", ".rayignore"]
    if os.environ.get("RAY_RUNTIME_ENV_IGNORE_GITIGNORE") == "1":  # as Ray's client decides
        names.remove(".gitignore")
    sizes: dict[Path, int] = {}

    def walk(inner: Path, lists: list[tuple[Path, GitIgnoreSpec]]) -> None:
        found = [inner / name for name in names if (inner / name).is_file()]
        lists = [*lists, *((inner, _spec(path.read_text("utf-8", "replace").splitlines())) for path in found)]
        for path in inner.iterdir():
            if any(spec.match_file(path.relative_to(root).as_posix()) for root, spec in lists):
                continue
            if path.is_dir():
                walk(path, lists)
            elif path.is_file():
                sizes[path] = path.stat().st_size

    walk(folder, [(folder, _spec(excludes))])
    return sizes


def _spec(lines: Sequence[str]) -> GitIgnoreSpec:
    return GitIgnoreSpec.from_lines(lines)
