"""The upload of a job's working directory: which files Ray takes, and what would not arrive."""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from grpo_ray.errors import RunError
from grpo_ray.tools.submit.submission import Submission

LIMIT_BYTES = 100 * 2**20  # a head node's dashboard refuses larger requests


def check_upload(job: Submission) -> None:
    """Compare the files that Ray will upload with those that the job reads, and with Ray's limit.

    Raises:
        RunError: a file would not arrive, or the upload is too large.
    """
    folder = Path(job.runtime_env["working_dir"])
    sent = uploaded_files(folder, job.runtime_env["excludes"])
    for field, name in job.relative_files.items():
        path = Path(os.path.normpath(folder / name))
        read = [file for file in path.iterdir() if file.name[0] != "."] if path.is_dir() else [path]
        left = [file for file in read if file.is_file() and file not in sent]
        if left:
            raise RunError(
                f"{field}: {os.path.relpath(left[0], folder)} is not uploaded with the working directory: "
                "it is outside of it, or excluded by .gitignore, .rayignore or submit itself "
                "(docs/cluster.md); move it, or give an absolute path that the cluster sees"
            )
    total = sum(sent.values())
    if total > LIMIT_BYTES:
        sizes: Counter[str] = Counter()
        for file, size in sent.items():
            sizes[file.relative_to(folder).parts[0]] += size
        largest = ", ".join(f"{name} ({_mib(size)})" for name, size in sizes.most_common(3))
        raise RunError(
            f"{folder}: {_mib(total)} would be uploaded, and Ray takes {_mib(LIMIT_BYTES)}; the largest: "
            f"{largest}. List in a .rayignore what is to stay here, and name what the run reads of it by an "
            "absolute path that the cluster sees"
        )


def uploaded_files(folder: Path, excludes: Sequence[str]) -> dict[Path, int]:
    """Return the files that Ray uploads from the folder, with their sizes; it does not compress them."""
    names = [".gitignore", ".rayignore"]
    if os.environ.get("RAY_RUNTIME_ENV_IGNORE_GITIGNORE") == "1":  # as Ray's client decides
        names.remove(".gitignore")
    sizes: dict[Path, int] = {}

    def walk(inner: Path, lists: list[_IgnoreList]) -> None:
        found = [inner / name for name in names if (inner / name).is_file()]
        lists = [
            *lists,
            *(_IgnoreList.of(inner, path.read_text("utf-8", "replace").splitlines()) for path in found),
        ]
        for path in inner.iterdir():
            if any(ignored.excludes(path) for ignored in lists):
                continue
            if path.is_dir():
                walk(path, lists)
            elif path.is_file():
                sizes[path] = path.stat().st_size

    walk(folder, [_IgnoreList.of(folder, excludes)])
    return sizes


@dataclass(frozen=True)
class _IgnoreList:
    """The patterns of one .gitignore, for paths below its folder; the last that matches decides."""

    folder: Path
    patterns: Sequence[tuple[bool, Sequence[str]]]
    """(whether a match excludes, a glob per part of the path); the glob `**` matches any number of parts."""

    @classmethod
    def of(cls, folder: Path, lines: Iterable[str]) -> "_IgnoreList":
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


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
