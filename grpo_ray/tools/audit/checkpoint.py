"""A run's newest checkpoint: it loads, it is finite, and its account of the prompts adds up."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from grpo_ray.telemetry.checkpoint import Checkpoint, read_checkpoint
from grpo_ray.telemetry.rollout_log import read_groups
from grpo_ray.telemetry.run_files import RunDirectory

UNFINISHED = ("in_flight", "buffered", "waiting")


@dataclass
class CheckpointFacts:
    problems: list[str] = field(default_factory=list)
    step: int = 0
    set_aside: frozenset[int] = frozenset()
    num_examples: int | None = None  # of the prompt order
    next_group_id: int | None = None  # the first group that was never taken
    unfinished: frozenset[int] = frozenset()  # taken, and still to be trained


def audit_checkpoint(run: RunDirectory, last_step: int, is_finished: bool) -> CheckpointFacts:
    """The newest; a run that goes on need not have one yet.

    Args:
        last_step: the newest with a line in metrics.jsonl.
    """
    folders = [path for path in run.checkpoints.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    if not folders:
        return CheckpointFacts(["there is no checkpoint"] if is_finished else [])
    newest = max(folders, key=lambda path: int(path.name.removeprefix("step-")))
    try:
        checkpoint = read_checkpoint(newest)
    except ValueError as error:
        return CheckpointFacts([f"checkpoints/{newest.name}: {error}"])
    state = checkpoint.state
    problems = [*_audit_tensors(newest), *_audit_ledger(checkpoint)]
    if is_finished and state.step != last_step:
        problems.append(f"it is not of the last step, {last_step}")
    named = [f"checkpoints/{newest.name}: {problem}" for problem in problems]
    ledger = state.ledger
    return CheckpointFacts(
        named,
        state.step,
        frozenset(ledger["set_aside"]),
        ledger["num_examples"],
        ledger["next_group_id"],
        frozenset(group for name in UNFINISHED for group in ledger[name]),
    )


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
        bad = [key for key, tensor in tensors.items() if not _is_finite(tensor)]
        if bad:
            yield f"{name}: {', '.join(bad[:5])} is not finite"


def _is_finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def _audit_ledger(checkpoint: Checkpoint) -> Iterator[str]:
    """Every group that was taken is trained, dropped, set aside, or still to be trained: one of them."""
    ledger: dict[str, Any] = checkpoint.state.ledger
    places = [*UNFINISHED, "set_aside"]
    counts = Counter(group for name in places for group in ledger[name])
    strange = sorted(group for group, n in counts.items() if n > 1 or not 0 <= group < ledger["next_group_id"])
    if strange:
        yield f"its ledger has more than one place, or a wrong one, for groups {strange[:10]}"
    num_done = ledger["next_group_id"] - len(counts)
    if ledger["num_trained"] + ledger["num_dropped"] != num_done:
        yield (
            f"its ledger counts {ledger['num_trained']} trained groups and {ledger['num_dropped']} dropped, "
            f"together not {num_done}"
        )
    unfinished = {group for name in UNFINISHED for group in ledger[name]}
    strangers = [g.group_id for g in read_groups(checkpoint.groups_path) if g.group_id not in unfinished]
    if strangers:
        yield f"training/groups.parquet holds groups {strangers}, which are not to be trained"
