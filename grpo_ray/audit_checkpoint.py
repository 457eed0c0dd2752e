"""A run's newest checkpoint: it loads, it is finite, and its account of the prompts adds up."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from grpo_ray.checkpoint import Checkpoint, read_checkpoint
from grpo_ray.telemetry.rollout_log import read_groups
from grpo_ray.telemetry.run_files import RunDirectory


@dataclass
class CheckpointFacts:
    problems: list[str] = field(default_factory=list)
    step: int = 0
    set_aside: frozenset[int] = frozenset()
    num_examples: int | None = None  # of the prompt order


def audit_checkpoint(
    run: RunDirectory, prompts_per_step: int, last_step: int, is_finished: bool
) -> CheckpointFacts:
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
    problems = [*_audit_tensors(newest), *_audit_ledger(checkpoint, prompts_per_step)]
    if is_finished and state.step != last_step:
        problems.append(f"it is not of the last step, {last_step}")
    named = [f"checkpoints/{newest.name}: {problem}" for problem in problems]
    ledger = state.ledger
    return CheckpointFacts(named, state.step, frozenset(ledger["set_aside"]), ledger["num_examples"])


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


def _audit_ledger(checkpoint: Checkpoint, prompts_per_step: int) -> Iterator[str]:
    """Every group that was taken is trained, set aside, or still to be trained: exactly one of them."""
    ledger: dict[str, Any] = checkpoint.state.ledger
    set_aside = set(ledger["set_aside"])
    places = {name: ledger[name] for name in ("in_flight", "buffered", "waiting")}
    due = set(range(checkpoint.state.step * prompts_per_step))
    places["trained"] = sorted(due - set_aside)
    places["set aside"] = sorted(set_aside)
    everything = sorted(group for groups in places.values() for group in groups)
    if everything != list(range(ledger["next_group_id"])):
        yield f"its ledger has {_differences(everything, ledger['next_group_id'])}"
    if ledger["num_trained"] != len(places["trained"]):
        yield f"its ledger counts {ledger['num_trained']} trained groups instead of {len(places['trained'])}"
    unfinished = {*places["in_flight"], *places["buffered"], *places["waiting"]}
    strangers = [g.group_id for g in read_groups(checkpoint.groups_path) if g.group_id not in unfinished]
    if strangers:
        yield f"training/groups.parquet holds groups {strangers}, which are not to be trained"


def _differences(groups: list[int], limit: int) -> str:
    missing = sorted(set(range(limit)) - set(groups))
    strange = sorted({group for group in groups if group >= limit or groups.count(group) > 1})
    return f"no place for groups {missing[:10]}, and more than one, or a wrong one, for {strange[:10]}"
