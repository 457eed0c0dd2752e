"""The audit of a run's newest checkpoint (it loads, is finite, and its ledger adds up), and hashes of runs."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from grpo_ray.errors import RunError
from grpo_ray.records.checkpoint import GROUPS, Checkpoint, CheckpointStore
from grpo_ray.records.rollout_log import read_groups, read_table
from grpo_ray.records.run_files import RunDirectory, files_by_step

UNFINISHED = ("in_flight", "buffered", "waiting")
LEDGER = (*UNFINISHED, "set_aside", "next_group_id", "num_trained", "num_dropped", "num_examples")
FILES = {"weights": "*.safetensors", "optimizer": "training/**/*.safetensors"}  # of a checkpoint
ROW = ("group_id", "sample", "use")
COMPARED = (
    "prompt_token_ids", "versions", "token_ids", "logprobs", "reward", "advantage", "turns", "sequences",
    "turn_advantages", "teacher_logprobs",
)  # fmt: skip
"""Columns of rollouts that training reads. Texts follow from tokens; names, errors and times may differ."""


@dataclass
class CheckpointFacts:
    """The checkpoint's data for the rest of the audit, and the problems with it."""

    problems: list[str] = field(default_factory=list)
    step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)  # its step's, which may have no line yet
    set_aside: frozenset[int] = frozenset()
    num_examples: int | None = None  # of the prompt order
    next_group_id: int | None = None  # the first group that was never taken
    unfinished: frozenset[int] = frozenset()  # taken, and still to be trained


def audit_checkpoint(run: RunDirectory, last_step: int, is_finished: bool) -> CheckpointFacts:
    """Audit the newest whole checkpoint, which a resume would take; an unfinished run may have none."""
    store = CheckpointStore(run)
    checkpoints = store.all()
    problems = [line.removeprefix(f"{run.path}/") for line in store.damaged]
    if not checkpoints:
        problems += ["there is no checkpoint"] if is_finished and not problems else []
        return CheckpointFacts(problems)
    newest = checkpoints[-1]
    state, ledger = newest.state, newest.state.ledger
    facts = CheckpointFacts(problems, state.step, state.metrics)
    found = list(_audit_tensors(newest.path))
    if lacking := [name for name in LEDGER if name not in ledger]:
        found.append(f"its ledger has no {', '.join(lacking)}")
    else:
        found += _audit_ledger(newest)
        facts.set_aside = frozenset(ledger["set_aside"])
        facts.num_examples, facts.next_group_id = ledger["num_examples"], ledger["next_group_id"]
        facts.unfinished = _unfinished(ledger)
    if is_finished and state.step != last_step:
        found.append(f"it is not of the last step, {last_step}")
    facts.problems += [f"checkpoints/{newest.path.name}: {problem}" for problem in found]
    return facts


def _audit_tensors(folder: Path) -> Iterator[str]:
    files = sorted(folder.rglob("*.safetensors"))
    if not any(file.parent == folder for file in files):
        yield "there are no weights"
    for file in files:
        name = file.relative_to(folder)
        try:
            tensors = load_file(file)
        except (OSError, SafetensorError) as error:
            yield f"{name} does not load: {error}"
            continue
        bad = [
            key for key, value in tensors.items() if value.is_floating_point() and not value.isfinite().all()
        ]
        if bad:
            yield f"{name}: {', '.join(bad[:5])} is not finite"


def _audit_ledger(checkpoint: Checkpoint) -> Iterator[str]:
    """Check that every group taken so far has one state: trained, dropped, set aside or unfinished."""
    ledger = checkpoint.state.ledger
    counts = Counter(group for name in (*UNFINISHED, "set_aside") for group in ledger[name])
    wrong = sorted(group for group, n in counts.items() if n > 1 or not 0 <= group < ledger["next_group_id"])
    if wrong:
        yield f"its ledger has several states, or an impossible one, for groups {wrong[:10]}"
    num_done = ledger["next_group_id"] - len(counts)
    if ledger["num_trained"] + ledger["num_dropped"] != num_done:
        yield (
            f"its ledger counts {ledger['num_trained']} trained groups and {ledger['num_dropped']} dropped, "
            f"together not {num_done}"
        )
    unfinished = _unfinished(ledger)
    held = read_groups(checkpoint.training_path / GROUPS)
    foreign = [group.group_id for group in held if group.group_id not in unfinished]
    if foreign:
        yield f"training/groups.parquet holds groups {foreign}, which the ledger has as done"


def _unfinished(ledger: dict[str, Any]) -> frozenset[int]:
    return frozenset(group for name in UNFINISHED for group in ledger[name])


def hashes(run: RunDirectory) -> dict[str, str]:
    """Return the SHA-256 of the newest checkpoint's weights, of its training state, and of all rollouts.

    Weights and state are hashed by name, dtype, shape and bytes; rollouts by the rows of each step in the order
    of their groups, whatever order they arrived in. A training state of several ranks is hashed by rank.

    Raises:
        RunError: the run has no checkpoint.
    """
    folder = _newest(run)
    rows = (row for path in files_by_step(run.rollouts).values() for row in _rows(path))
    of_files = {name: _sha256(_bytes_of(*each) for each in _tensors(folder, name)) for name in FILES}
    return {**of_files, "rollouts": _sha256(repr(row).encode() for row in rows)}


def first_difference(run: RunDirectory, other: RunDirectory) -> str | None:
    """Return where two runs first differ: the step, group and token, or the tensor; None if they nowhere do."""
    paths, others = (list(files_by_step(each.rollouts).values()) for each in (run, other))
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
