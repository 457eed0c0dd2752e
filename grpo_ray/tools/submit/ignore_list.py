"""The patterns of a .gitignore, and the files that Ray takes from a folder beside them."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path


def uploaded_files(folder: Path, excludes: Sequence[str]) -> dict[Path, int]:
    """Return the files that Ray uploads from the folder, with their sizes; it does not compress them."""
    names = [".gitignore", ".rayignore"]
    if os.environ.get("RAY_RUNTIME_ENV_IGNORE_GITIGNORE") == "1":  # as Ray's client decides
        names.remove(".gitignore")
    sizes: dict[Path, int] = {}

    def walk(inner: Path, lists: list[IgnoreList]) -> None:
        found = [inner / name for name in names if (inner / name).is_file()]
        lists = [
            *lists,
            *(IgnoreList.of(inner, path.read_text("utf-8", "replace").splitlines()) for path in found),
        ]
        for path in inner.iterdir():
            if any(ignored.excludes(path) for ignored in lists):
                continue
            if path.is_dir():
                walk(path, lists)
            elif path.is_file():
                sizes[path] = path.stat().st_size

    walk(folder, [IgnoreList.of(folder, excludes)])
    return sizes


@dataclass(frozen=True)
class IgnoreList:
    """The patterns of one .gitignore, for paths below its folder; the last that matches decides."""

    folder: Path
    patterns: Sequence[tuple[bool, Sequence[str]]]
    """(whether a match excludes, a glob per part of the path); the glob `**` matches any number of parts."""

    @classmethod
    def of(cls, folder: Path, lines: Iterable[str]) -> "IgnoreList":
        stripped = [line.strip() for line in lines]
        return cls(folder, [_pattern(line) for line in stripped if line and not line.startswith("#")])

    def excludes(self, path: Path) -> bool:
        parts = path.relative_to(self.folder).parts
        return next((excludes for excludes, globs in reversed(self.patterns) if _matches(parts, globs)), False)


def _pattern(line: str) -> tuple[bool, Sequence[str]]:
    text = line.removeprefix("!")
    globs = text.strip("/").split("/")
    if "/" not in text.rstrip("/"):  # without a slash in front or within, it matches in every folder
        globs = ["**", *globs]
    if text.endswith("/"):
        globs.append("*")  # matches what a folder holds
    if globs[-1] == "**":
        globs[-1] = "*"
    return text == line, globs


def _matches(parts: Sequence[str], globs: Sequence[str]) -> bool:
    """Return whether the globs match the path, or a folder that it lies in."""
    if not globs:
        return True
    if globs[0] == "**":
        return _matches(parts, globs[1:]) or (bool(parts) and _matches(parts[1:], globs))
    return bool(parts) and fnmatchcase(parts[0], globs[0]) and _matches(parts[1:], globs[1:])
