"""Checkpoints: folders that appear whole or not at all, and the newest whole one found again.

    checkpoints/step-000040/           the policy in Hugging Face format: from_pretrained and vLLM load it
        training/                      apart, because vLLM loads every *.safetensors beside the model's
            optimizer.safetensors      optimizer, random generators, version
            groups.parquet             scored groups that waited to be trained
            replay.parquet             those that were trained, and may be again
            state.json                 the RunState, and the size of every other file; written last

Folders of other names: `unfinished-*` is being written, `replaced-*` and `discarded-*` are on their way out.
"""

import json
import math
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo_ray.config import Config
from grpo_ray.telemetry.durable import sync, sync_tree
from grpo_ray.telemetry.json_lines import read_lines, to_json
from grpo_ray.telemetry.run_files import RunDirectory, step_name


@dataclass(frozen=True)
class RunState:
    """Where a run stood after a step, but for the weights, the optimizer and the buffered groups."""

    step: int  # completed steps, and so the policy's version
    ledger: dict[str, Any]  # PromptLedger.state_dict()
    metrics: dict[str, float]  # the step's line as far as it was known


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    state: RunState

    @property
    def model_path(self) -> Path:
        return self.path

    @property
    def training_path(self) -> Path:
        return self.path / "training"

    @property
    def groups_path(self) -> Path:
        return self.training_path / "groups.parquet"


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a folder.

    Raises:
        ValueError: it is not whole; says what is wrong.
    """
    try:
        data = json.loads(_state_path(path).read_text(encoding="utf-8"))
        state = RunState(**{name: data[name] for name in ("step", "ledger", "metrics")})
        sizes = {path / name: size for name, size in data["files"].items()}
        state.metrics.update({name: math.nan for name, value in state.metrics.items() if value is None})
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"training/state.json is not readable ({error!r})") from error
    for file, size in sizes.items():
        if not file.is_file():
            raise ValueError(f"{file.relative_to(path)} is missing")
        if file.stat().st_size != size:
            raise ValueError(f"{file.relative_to(path)} has {file.stat().st_size} bytes instead of {size}")
    return Checkpoint(path, state)


class CheckpointStore:
    """The checkpoints of one run. One is written at a time: `begin`, the writers, `commit`."""

    def __init__(self, folder: Path, keep: int, keep_best: bool, evaluations_summary_path: Path) -> None:
        self._folder = folder
        self._keep = keep
        self._keep_best = keep_best
        self._summary_path = evaluations_summary_path
        self._in_use: set[int] = set()  # given out by `latest`: engines may load such a one again
        self.damaged: list[str] = []

    def begin(self, step: int) -> Path:
        """A fresh folder to write to, with `training/` in it; what was left of earlier tries is removed."""
        self.discard_unfinished()
        folder = self._unfinished(step)
        (folder / "training").mkdir(parents=True)
        return folder

    def commit(self, step: int, state: RunState) -> Checkpoint:
        """Make the folder that `begin` gave a checkpoint, and delete those that are no longer to be kept.

        Raises:
            OSError: it could not be written; the checkpoints are those that were there before.
        """
        assert state.step == step
        unfinished, final = self._unfinished(step), self._folder / step_name(step)
        files = sorted(file for file in unfinished.rglob("*") if file.is_file())
        sizes = {str(file.relative_to(unfinished)): file.stat().st_size for file in files}
        text = json.dumps(to_json({**asdict(state), "files": sizes}), allow_nan=False, indent=1)
        _state_path(unfinished).write_text(text, encoding="utf-8")
        sync_tree(unfinished)
        replaced = self._renamed("replaced", final)
        if final.exists():  # a crash between the two renames is put right by `latest`
            _delete(replaced)
            final.rename(replaced)
        unfinished.rename(final)
        sync(self._folder)
        _delete(replaced)
        self._prune(newest=step)
        return Checkpoint(final, state)

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint; why newer ones were passed over is in `damaged`. It is never pruned."""
        self._put_back_replaced()
        self.damaged = []
        for step, folder in sorted(self._folders("step"), reverse=True):
            try:
                checkpoint = read_checkpoint(folder)
                if checkpoint.state.step != step:
                    raise ValueError(f"training/state.json is of step {checkpoint.state.step}")
            except ValueError as error:
                self.damaged.append(f"{folder}: {error}")
                continue
            self._in_use.add(step)
            return checkpoint
        return None

    def discard_unfinished(self) -> None:
        """Remove what an interrupted or failed checkpoint left."""
        self._put_back_replaced()
        for name in ("unfinished", "discarded"):
            for _, folder in self._folders(f"{name}-step"):
                _delete(folder)

    def _put_back_replaced(self) -> None:
        for _, folder in self._folders("replaced-step"):
            original = folder.with_name(folder.name.removeprefix("replaced-"))
            if original.exists():
                _delete(folder)
            else:
                folder.rename(original)

    def _prune(self, newest: int) -> None:
        """Delete what is not to be kept. A damaged one newer than `newest` stays: the run will replace it."""
        whole = {step for step, folder in self._folders("step") if _is_whole(folder)}
        try:
            best = self._best(whole)
        except ValueError:  # the line that cannot be read may be the best one's
            return
        kept = {newest, *sorted(whole)[-self._keep :], *self._in_use, *best}
        for step, folder in self._folders("step"):
            if step not in kept and (step < newest or step in whole):
                with suppress(OSError):  # the run goes on, and tries again at the next checkpoint
                    self._discard(folder)

    def _discard(self, folder: Path) -> None:
        """Rename first: a deletion that is interrupted leaves no half of a checkpoint."""
        discarded = self._renamed("discarded", folder)
        _delete(discarded)
        folder.rename(discarded)
        _delete(discarded)

    def _best(self, steps: set[int]) -> set[int]:
        best = best_step(steps, self._summary_path) if self._keep_best else None
        return set() if best is None else {best}

    def _folders(self, prefix: str) -> Iterator[tuple[int, Path]]:
        for folder in sorted(self._folder.glob(f"{prefix}-*")):
            match = re.fullmatch(rf"{prefix}-(\d+)", folder.name)
            if match and folder.is_dir():
                yield int(match[1]), folder

    def _unfinished(self, step: int) -> Path:
        return self._folder / f"unfinished-{step_name(step)}"

    def _renamed(self, prefix: str, folder: Path) -> Path:
        return folder.with_name(f"{prefix}-{folder.name}")


def best_step(steps: Iterable[int], evaluations_summary_path: Path) -> int | None:
    """The one with the best validation reward (of equals the newest); None: none of them was evaluated."""
    if not evaluations_summary_path.exists():
        return None
    rewards = {row.get("step"): row.get("reward") for row in read_lines(evaluations_summary_path)}
    evaluated = [step for step in steps if rewards.get(step) is not None]
    return max(evaluated, key=lambda step: (rewards[step], step), default=None)


def make_store(config: Config, run: RunDirectory) -> CheckpointStore:
    keep = config.checkpoint
    return CheckpointStore(run.checkpoints, keep.keep, keep.keep_best, run.evaluations_summary_path)


def _state_path(folder: Path) -> Path:
    return folder / "training" / "state.json"


def _is_whole(folder: Path) -> bool:
    try:
        read_checkpoint(folder)
    except ValueError:
        return False
    return True


def _delete(folder: Path) -> None:
    """What cannot be deleted stays, and is tried again with the next checkpoint."""
    shutil.rmtree(folder, ignore_errors=True)
