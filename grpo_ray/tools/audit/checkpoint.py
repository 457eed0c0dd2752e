"""The audit of a run's newest checkpoint: it loads, it is finite, and its prompt ledger adds up."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from grpo_ray.records.checkpoint import Checkpoint, CheckpointStore
from grpo_ray.records.rollout_log import read_groups
from grpo_ray.records.run_files import RunDirectory

UNFINISHED = ("in_flight", "buffered", "waiting")
LEDGER = (*UNFINISHED, "set_aside", "next_group_id", "num_trained", "num_dropped", "num_examples")


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
    """Audit the newest whole checkpoint, which is the one that a resume would take.

    Args:
        last_step: the last step with a line in metrics.jsonl.
        is_finished: False for a run that may not have a checkpoint yet.
    """
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
        bad = [key for key, tensor in tensors.items() if not _is_finite(tensor)]
        if bad:
            yield f"{name}: {', '.join(bad[:5])} is not finite"


def _is_finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


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
    foreign = [g.group_id for g in read_groups(checkpoint.groups_path) if g.group_id not in unfinished]
    if foreign:
        yield f"training/groups.parquet holds groups {foreign}, which the ledger has as done"


def _unfinished(ledger: dict[str, Any]) -> frozenset[int]:
    return frozenset(group for name in UNFINISHED for group in ledger[name])
