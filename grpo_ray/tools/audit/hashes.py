"""Hashes of what a run learned and trained on, and where two runs first differ."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from grpo_ray.errors import RunError
from grpo_ray.records.checkpoint import CheckpointStore
from grpo_ray.records.rollout_log import read_table
from grpo_ray.records.run_files import RunDirectory

FILES = {"weights": "*.safetensors", "optimizer": "training/**/*.safetensors"}  # of a checkpoint
ROW = ("group_id", "sample", "use")
COMPARED = (
    "prompt_token_ids", "versions", "token_ids", "logprobs", "reward", "advantage", "turns", "sequences",
    "turn_advantages", "teacher_logprobs",
)  # fmt: skip
"""Columns of rollouts that training reads. Texts follow from tokens; names, errors and times may differ."""


def hashes(run: RunDirectory) -> dict[str, str]:
    """Return the SHA-256 of the newest checkpoint's weights, of its training state, and of all rollouts.

    Weights and state are hashed by name, dtype, shape and bytes; rollouts by the rows of each step in the order
    of their groups, whatever order they arrived in. A training state of several ranks is hashed by rank.

    Raises:
        RunError: the run has no checkpoint.
    """
    folder = _newest(run)
    rows = (row for path in _rollouts(run) for row in _rows(path))
    of_files = {name: _sha256(_bytes_of(*each) for each in _tensors(folder, name)) for name in FILES}
    return {**of_files, "rollouts": _sha256(repr(row).encode() for row in rows)}


def first_difference(run: RunDirectory, other: RunDirectory) -> str | None:
    """Return where two runs first differ: the step, group and token, or the tensor; None if they nowhere do."""
    paths, others = _rollouts(run), _rollouts(other)
    for path, theirs in zip(paths, others, strict=False):
        if path.name != theirs.name:
            return f"{path.name} stands where the other run has {theirs.name}"
        if (found := _in_rows(list(_rows(path)), list(_rows(theirs)))) is not None:
            return f"{path.stem}: {found}"
    if len(paths) != len(others):
        return f"{len(paths)} steps of rollouts, and {len(others)}"
    folders = [_newest(each) for each in (run, other)]
    for files in FILES:
        first, second = (dict(_tensors(folder, files)) for folder in folders)
        for name in sorted(first.keys() | second.keys()):
            pair = [_bytes_of(name, tensors[name]) for tensors in (first, second) if name in tensors]
            if len(pair) < 2 or pair[0] != pair[1]:
                return f"the newest checkpoint's {name}"
    return None


def _in_rows(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> str | None:
    for row, other in zip(rows, others, strict=False):
        place = ", ".join(f"{name.removesuffix('_id')} {row[name]}" for name in ROW[:2])
        if [row[name] for name in ROW] != [other[name] for name in ROW]:
            return f"{place} stands where the other run has group {other['group_id']}"
        for name in COMPARED:
            mine, theirs = row.get(name), other.get(name)
            if repr(mine) == repr(theirs):
                continue
            if isinstance(mine, list) and isinstance(theirs, list):
                pairs = enumerate(zip(mine, theirs, strict=False))
                at = next((n for n, (a, b) in pairs if repr(a) != repr(b)), min(len(mine), len(theirs)))
                return f"{place}, {name} from place {at} on: {mine[at : at + 1]} and {theirs[at : at + 1]}"
            return f"{place}, {name}: {mine} and {theirs}"
    return None if len(rows) == len(others) else f"{len(rows)} responses, and {len(others)}"


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    table = read_table(path)
    table = table.select([name for name in (*ROW, *COMPARED) if name in table.column_names])
    yield from table.sort_by([(name, "ascending") for name in ROW]).to_pylist()


def _rollouts(run: RunDirectory) -> list[Path]:
    return sorted(run.rollouts.glob("step-*.parquet"))


def _newest(run: RunDirectory) -> Path:
    store = CheckpointStore(run)
    checkpoints = store.all()
    if max([*store.damaged, *(str(each.path) for each in checkpoints)], default="") in store.damaged:
        raise RunError(f"damaged, so another checkpoint would be hashed: {store.damaged[-1]}")
    if not checkpoints:
        raise RunError(f"{run.path}: there is no checkpoint to hash")
    return checkpoints[-1].path


def _tensors(folder: Path, files: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a checkpoint's files by name; those of a further rank with its file's name."""
    for number, path in enumerate(sorted(folder.glob(FILES[files]))):
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                yield (f"{name} of {path.name}" if number else name), file.get_tensor(name)


def _bytes_of(name: str, tensor: torch.Tensor) -> bytes:
    head = f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode()
    return head + tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def _sha256(parts: Iterator[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
