"""What is evaluated: the model of a configuration, a run's checkpoints, or any model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from grpo_ray.config.loading import make_config, read_config
from grpo_ray.config.schema import nearest_name
from grpo_ray.errors import RunError
from grpo_ray.policy.loading import is_local
from grpo_ray.telemetry.checkpoint import Checkpoint, best_step, read_checkpoint
from grpo_ray.telemetry.run_files import RunDirectory

CHOICES = "last, best, all, initial, or one of them such as step-000040"


@dataclass(frozen=True)
class Weights:
    """One policy: of a step of a run, or (step 0) the configuration's own model."""

    step: int
    folder: Path | None = None  # None: `model` of the configuration

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "Weights":
        return cls(checkpoint.state.step, checkpoint.model_path)


@dataclass(frozen=True)
class Subject:
    """A configuration as it was written, and the weights to evaluate under it, in the order of their steps."""

    name: str  # for the folder
    source: str  # begins messages about the configuration
    data: dict[str, Any]
    weights: tuple[Weights, ...]
    notices: tuple[str, ...] = ()
    is_run: bool = False


def find_subject(target: str, checkpoint: str | None = None) -> Subject:
    """The CONFIG, RUN or MODEL that `target` names.

    Args:
        checkpoint: of a run: `last` (the default), `best`, `all`, `initial` or a checkpoint's name.

    Raises:
        RunError: it is none of them; says what was looked for.
        ConfigError: the YAML cannot be read.
    """
    path = Path(target).expanduser()
    if path.suffix in (".yaml", ".yml"):
        _refuse_checkpoint(target, "a configuration", checkpoint)
        return Subject(path.stem, target, read_config(path), (Weights(0),))
    if (path / "config.yaml").is_file():
        return _run_subject(RunDirectory(path), checkpoint or "last")
    if (path.parent.parent / "config.yaml").is_file() and path.parent.name == "checkpoints" and path.is_dir():
        _refuse_checkpoint(target, "a checkpoint", checkpoint)
        return _run_subject(RunDirectory(path.parent.parent), path.name)
    if "/" in target and not path.exists() and path.parent.is_dir():  # else it would be looked for on the hub
        nearest = nearest_name(path.name, sorted(entry.name for entry in path.parent.iterdir()))
        hint = f"; did you mean {path.parent / nearest}?" if nearest else ""
        raise RunError(f"{target}: no such run or model folder in {path.parent}{hint}")
    if (path / "config.json").is_file() or not is_local(target):
        _refuse_checkpoint(target, "a model", checkpoint)
        return _model_subject(str(path) if path.exists() else target)
    raise RunError(
        f"{target}: nothing to evaluate; give a configuration (a .yaml file), a run's folder (with a "
        "config.yaml), a model's folder (with a config.json), or a model on the hub as owner/name"
    )


def _refuse_checkpoint(target: str, what: str, checkpoint: str | None) -> None:
    if checkpoint is not None:
        raise RunError(f"--checkpoint: {target} is {what}; only a run's folder has checkpoints to choose from")


def _model_subject(target: str) -> Subject:
    """With the defaults of the configuration, but for a machine without a GPU.

    And but for `min_tokens`, which is for training: a model may end its response where it likes.
    """
    data: dict[str, Any] = {"model": {"path": target}, "sampling": {"min_tokens": 0}}
    notices: tuple[str, ...] = ()
    if not torch.cuda.is_available():
        data["model"]["dtype"] = "float32"
        data["generator"] = {"num_gpus": 0}
        notices = ("no GPU here: generator.num_gpus=0 model.dtype=float32",)
    return Subject(Path(target).name, target, data, (Weights(0),), notices)


def _run_subject(run: RunDirectory, choice: str) -> Subject:
    checkpoints, damaged = _checkpoints(run)
    data = read_config(run.config_path)
    chosen = _choose(run, checkpoints, choice)
    notices = list(damaged)
    if choice == "all":
        notices += _missing(run, data, len(checkpoints) + len(damaged), chosen[-1].step)
    return Subject(run.path.resolve().name, str(run.config_path), data, tuple(chosen), tuple(notices), True)


def _missing(run: RunDirectory, data: dict[str, Any], num_kept: int, last_step: int) -> list[str]:
    """A line on the checkpoints that a curve lacks, because the run deleted them."""
    every_num_steps = make_config(data, (), run.config_path).checkpoint.every_num_steps
    num_made = math.ceil(last_step / every_num_steps)  # the last one may be between two
    if num_kept >= num_made:
        return []
    return [
        f"the run kept {num_kept} of its {num_made} checkpoints; train with checkpoint.keep={num_made} for a "
        "curve of all"
    ]


def _checkpoints(run: RunDirectory) -> tuple[list[Checkpoint], list[str]]:
    """The whole ones, oldest first, and a line for each that is damaged."""
    whole, damaged = [], []
    for folder in sorted(run.checkpoints.glob("step-*")):
        try:
            whole.append(read_checkpoint(folder))
        except ValueError as error:
            damaged.append(f"{folder} is passed over, because it is damaged: {error}")
    return sorted(whole, key=lambda checkpoint: checkpoint.state.step), damaged


def _choose(run: RunDirectory, checkpoints: Sequence[Checkpoint], choice: str) -> list[Weights]:
    if choice == "initial":
        return [Weights(0)]
    if not checkpoints:
        raise RunError(
            f"{run.path}: the run has no checkpoint yet; evaluate what it began with by --checkpoint initial"
        )
    by_name = {checkpoint.path.name: checkpoint for checkpoint in checkpoints}
    if choice == "all":  # from the beginning, unless a checkpoint of step 0 stands for it
        first = [] if checkpoints[0].state.step == 0 else [Weights(0)]
        return [*first, *(Weights.of(checkpoint) for checkpoint in checkpoints)]
    if choice == "last":
        return [Weights.of(checkpoints[-1])]
    if choice == "best":
        return [Weights.of(_best(run, checkpoints))]
    if choice not in by_name:
        raise RunError(
            f"--checkpoint: {run.path} has no checkpoint {choice!r}, but {', '.join(by_name)}; give {CHOICES}"
        )
    return [Weights.of(by_name[choice])]


def _best(run: RunDirectory, checkpoints: Sequence[Checkpoint]) -> Checkpoint:
    """The one with the highest validation reward while training; of equals the newest."""
    by_step = {checkpoint.state.step: checkpoint for checkpoint in checkpoints}
    best = best_step(by_step, run.evaluations_summary_path)
    if best is None:
        raise RunError(f"--checkpoint best: no checkpoint of {run.path} was validated; give its name")
    return by_step[best]
