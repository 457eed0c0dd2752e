"""Checkpoints: folders that appear whole or not at all, and the one reader of them.

    checkpoints/step-000040/           the policy in Hugging Face format: from_pretrained and vLLM load it
        training/                      separate, because vLLM loads every *.safetensors next to the model's
            optimizer.safetensors      optimizer, random generators, version
            groups.parquet             scored groups that were waiting to be trained
            replay.parquet             trained groups that may be replayed
            state.json                 the CheckpointState; each file's size and checksum; written last

Folders with other names: `unfinished-*` is being written, `replaced-*` and `discarded-*` are being deleted.
"""

import json
import math
import re
import shutil
import time
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_ray.config.run import CheckpointConfig
from grpo_ray.errors import RunError
from grpo_ray.records.durable import sync, sync_files
from grpo_ray.records.json_lines import readable_rows, to_json
from grpo_ray.records.run_files import RunDirectory, step_name

LAST, BEST = "last", "best"
GROUPS, REPLAY = "groups.parquet", "replay.parquet"  # in `training/`
MISSING = FileNotFoundError, NotADirectoryError
LEFT_BEHIND = re.compile(r"unfinished-step-\d+(-[0-9a-f]{8})?|discarded-step-\d+")
CHECKSUM_BYTES = 2**26  # a larger file has no checksum: reading it again would take as long as writing it
VISIBLE_S = 60.0  # a network file system hides another node's file no longer


@dataclass(frozen=True)
class CheckpointState:
    """A run's state after a step, except for the weights, the optimizer and the buffered groups."""

    step: int  # completed steps, which is the policy's version
    ledger: dict[str, Any]  # GroupBook.state_dict()
    metrics: dict[str, float]  # the step's metrics as far as they were known


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    path: Path
    state: CheckpointState

    @property
    def training_path(self) -> Path:
        return self.path / "training"


def read_checkpoint(path: Path, reads_files: bool = False) -> Checkpoint:
    """Return the checkpoint in a folder; with `reads_files`, compare checksums and the headers of weights too.

    Raises:
        ValueError: the checkpoint is damaged; says how.
        OSError: a file is there and cannot be read, now or for this user.
    """
    try:
        data = json.loads(_state_path(path).read_text(encoding="utf-8"))
        if data.pop("seal", None) not in (None, _seal(data)):  # None: of an older version
            raise ValueError("it has changed since it was written")
        state = CheckpointState(**{name: data[name] for name in ("step", "ledger", "metrics")})
        sizes = {path / name: size for name, size in data["files"].items()}
        sums = {path / name: crc for name, crc in data.get("crc32", {}).items()} if reads_files else {}
        state.metrics.update({name: math.nan for name, value in state.metrics.items() if value is None})
    except (*MISSING, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"training/state.json is not readable ({error!r})") from error
    for file, size in sizes.items():
        if not file.is_file():
            raise ValueError(f"{file.relative_to(path)} is missing")
        if file.stat().st_size != size:
            raise ValueError(f"{file.relative_to(path)} has {file.stat().st_size} bytes instead of {size}")
        if file in sums and zlib.crc32(file.read_bytes()) != sums[file]:
            raise ValueError(f"{file.relative_to(path)} has changed since it was written")
    for file in sorted(path.rglob("*.safetensors")) if reads_files else ():
        if not _has_header(file):
            raise ValueError(f"{file.relative_to(path)} has a damaged header")
    return Checkpoint(path, state)


class CheckpointStore:
    """The checkpoints of one run.

    Anyone may read: `all`, `choose`. Writing, and `latest`, which repairs what a crash left, are for
    the process that holds the run's lock. One is written at a time: `begin`, the writers, `commit`.
    """

    def __init__(self, run: RunDirectory, config: CheckpointConfig | None = None) -> None:
        """Open the store; the configuration limits what `commit` keeps."""
        self._run, self._config = run, config or CheckpointConfig()
        self._folder = run.checkpoints
        self._unfinished: Path | None = None  # the folder of the current attempt
        self._in_use: set[int] = set()  # returned by `latest`: engines may load them again
        self.damaged: list[str] = []  # by the last reading: each damaged checkpoint, and how
        self.has_had_one = False  # this object has read or written a whole checkpoint

    # ---- reading ----

    def all(self, reads_files: bool = True, is_strict: bool = False) -> list[Checkpoint]:
        """Return the whole checkpoints, oldest first; the others are in `damaged`.

        Args:
            reads_files: compare checksums, and the headers of weights; otherwise sizes alone.
            is_strict: one that cannot be read now is an OSError and not damaged.
        """
        self.damaged = []
        folders = sorted(self._folders("step"))
        checkpoints = [self._read(step, folder, reads_files, is_strict) for step, folder in folders]
        return [checkpoint for checkpoint in checkpoints if checkpoint is not None]

    def choose(self, choice: str, option: str, others: Sequence[str] = ()) -> Checkpoint:
        """Return the checkpoint that a user asked for: `last`, `best` or a name such as `step-000040`.

        Args:
            option: the command-line option that `choice` was given by, for errors.
            others: further values of that option, for errors.

        Raises:
            RunError: there is no such checkpoint; says which there are.
        """
        found = {checkpoint.path.name: checkpoint for checkpoint in self.all(reads_files=False)}
        wanted = [name for name in found if choice in (LAST, name)]
        if choice == BEST:
            names = {checkpoint.state.step: name for name, checkpoint in found.items()}
            wanted = [names[step] for step in _by_reward(names, self._rewards())]
        for name in reversed(wanted):
            chosen = found.pop(name)
            if self._read(chosen.state.step, chosen.path, reads_files=True, is_strict=False) is not None:
                return chosen
        if not found:
            state = "checkpoint yet" if not self.damaged else "whole checkpoint"
            raise RunError("; ".join((f"{self._run.path} has no {state}", *self.damaged)))
        if choice == BEST:
            raise RunError(f"{option} best: no checkpoint of {self._run.path} was validated; give its name")
        place = f"{self._folder / choice}:"
        damaged = "".join(f"{line}. " for line in self.damaged if line.startswith(place))
        raise RunError(
            f"{option}: {damaged}{self._run.path} has no checkpoint {choice!r}; give "
            f"{', '.join((LAST, BEST, *others))}, or one of: {', '.join(found)}"
        )

    def latest(self) -> Checkpoint | None:
        """Return the newest whole checkpoint, which is never pruned; `damaged` has the newer ones.

        Checksums, and the headers of weights, are compared as well: a run that began with damaged files would
        end at every resume, or continue as another. Only for the process that holds the run's lock.

        Raises:
            OSError: one cannot be read now; an older one in its place would cost the steps since.
        """
        self._put_back_replaced()
        self.damaged = []
        for step, folder in sorted(self._folders("step"), reverse=True):
            checkpoint = self._read(step, folder, reads_files=True, is_strict=True)
            if checkpoint is not None:
                self._in_use.add(step)
                self.has_had_one = True
                return checkpoint
        return None

    def _read(self, step: int, folder: Path, reads_files: bool, is_strict: bool) -> Checkpoint | None:
        try:
            checkpoint = read_checkpoint(folder, reads_files)
            if checkpoint.state.step != step:
                raise ValueError(f"training/state.json is of step {checkpoint.state.step}")
        except (OSError, ValueError) as error:
            if is_strict and isinstance(error, OSError):
                raise
            self.damaged.append(f"{folder}: {error}")
            return None
        return checkpoint

    @property
    def skipped(self) -> list[str]:
        """A notice for each checkpoint that the last reading passed over."""
        return [f"skipped, because it is damaged: {line}" for line in self.damaged]

    def _rewards(self) -> dict[Any, Any]:
        """Return the validation reward of each step; of a damaged line there is none."""
        return {row.get("step"): row.get("reward") for row in readable_rows(self._run.evaluations_summary_path)}

    # ---- writing ----

    def begin(self, step: int) -> Path:
        """Return a new folder to write to, with `training/` in it; delete what earlier attempts left.

        Each attempt has a name of its own: an actor that a partition cut off may still write to an earlier one.

        Raises:
            RunError: another process writes to this run.
        """
        self._run.check_lock()
        self.discard_unfinished()
        self._folder.mkdir(exist_ok=True)  # not its parents: the run may have been moved away
        self._unfinished = self._folder / f"unfinished-{step_name(step)}-{uuid.uuid4().hex[:8]}"
        (self._unfinished / "training").mkdir(parents=True)
        return self._unfinished

    def commit(self, step: int, state: CheckpointState, files: Mapping[str, int]) -> Checkpoint:
        """Turn the folder from `begin` into a checkpoint, and delete the checkpoints that are not kept.

        Args:
            files: size of each file in the folder, as reported by the process that wrote it.

        Raises:
            OSError: it could not be written; the previous checkpoints are unchanged.
        """
        assert state.step == step
        assert self._unfinished is not None, "begin first"
        unfinished, final = self._unfinished, self._folder / step_name(step)
        _sync_reported(unfinished, files)
        sums = {f: zlib.crc32((unfinished / f).read_bytes()) for f, n in files.items() if n <= CHECKSUM_BYTES}
        data = to_json({**vars(state), "files": files, "crc32": sums})
        text = json.dumps(data | {"seal": _seal(data)}, allow_nan=False)
        _state_path(unfinished).write_text(text, encoding="utf-8")
        sync_files([_state_path(unfinished), unfinished / "training"])
        replaced = final.with_name(f"replaced-{final.name}")
        if final.exists():  # `latest` repairs a crash between the two renames
            _delete(replaced)
            final.rename(replaced)
        unfinished.rename(final)
        self.has_had_one = True
        sync(self._folder)
        _delete(replaced)
        self._prune(newest=step)
        return Checkpoint(final, state)

    def discard_unfinished(self) -> None:
        """Delete what an interrupted or failed checkpoint left."""
        self._put_back_replaced()
        for folder in self._folder.glob("*-step-*"):
            if LEFT_BEHIND.fullmatch(folder.name) and folder.is_dir():
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
        try:
            whole = {checkpoint.state.step for checkpoint in self.all(reads_files=False, is_strict=True)}
        except OSError:  # one that cannot be read now may be the best
            return
        kept = {newest, *sorted(whole)[-self._config.keep :], *self._in_use}
        if self._config.keep_best:
            rewards = self._rewards()
            files = {step for step in whole if (self._run.evaluations / f"{step_name(step)}.parquet").exists()}
            # One without the line of its validation may be the best, too.
            kept |= {*_by_reward(whole, rewards)[-1:], *(files - rewards.keys())}
        for step, folder in self._folders("step"):
            if step not in kept and (step < newest or step in whole):
                with suppress(OSError):  # the next checkpoint tries again
                    self._discard(folder)

    def _discard(self, folder: Path) -> None:
        """Rename, then delete: an interrupted deletion leaves no partial checkpoint."""
        discarded = folder.with_name(f"discarded-{folder.name}")
        _delete(discarded)
        folder.rename(discarded)
        _delete(discarded)

    def _folders(self, prefix: str) -> Iterator[tuple[int, Path]]:
        for folder in sorted(self._folder.glob(f"{prefix}-*")):
            match = re.fullmatch(rf"{prefix}-(\d+)", folder.name)
            if match and folder.is_dir():
                yield int(match[1]), folder


def _by_reward(steps: Iterable[int], rewards: Mapping[Any, Any]) -> list[int]:
    """Return the steps with a validation reward, the highest last, of equals the newest."""
    validated = [step for step in steps if rewards.get(step) is not None]
    return sorted(validated, key=lambda step: (rewards[step], step))


def _state_path(folder: Path) -> Path:
    return folder / "training" / "state.json"


def _seal(data: Any) -> int:
    return zlib.crc32(json.dumps(data).encode())


def _has_header(file: Path) -> bool:
    """Return whether a file of tensors begins with a header that fits its size.

    It is read, not mapped as the library does: an error of the disk would end this process.
    """
    size = file.stat().st_size - 8
    with file.open("rb") as data:
        length = int.from_bytes(data.read(8), "little")
        text = data.read(length) if length <= size else b""
    try:
        tensors = {name: entry for name, entry in json.loads(text).items() if name != "__metadata__"}
        return size - length == max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    except (ValueError, LookupError, TypeError, AttributeError):
        return False


def _sync_reported(folder: Path, files: Mapping[str, int]) -> None:
    """Flush the files that the actors report, and check that they are the files that this node sees.

    Raises:
        OSError: one of them is not there, or has another size.
    """
    give_up_at = time.monotonic() + VISIBLE_S
    for name, size in files.items():
        while (found := _synced_size(folder / name)) != size:
            if time.monotonic() > give_up_at:
                raise OSError(
                    f"{folder / name}: its writer reports {size} bytes, but this machine sees {found or 0}"
                )
            time.sleep(0.2)


def _synced_size(path: Path) -> int | None:
    try:
        return sync(path)
    except FileNotFoundError:
        return None


def _delete(folder: Path) -> None:
    """Delete what can be deleted; the rest is retried with the next checkpoint."""
    shutil.rmtree(folder, ignore_errors=True)
