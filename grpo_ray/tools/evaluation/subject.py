"""The subject of an evaluation: the model of a configuration, a run's checkpoints, or any model."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_ray.config.loading import make_config, read_config
from grpo_ray.config.schema import nearest_name
from grpo_ray.errors import RunError
from grpo_ray.learning.model_files import is_local
from grpo_ray.records.adapter_files import is_adapter, saved_config
from grpo_ray.records.checkpoint import LAST, Checkpoint, CheckpointStore
from grpo_ray.records.run_files import RunDirectory

YAML = (".yaml", ".yml")
RUN_CONFIG = "config.yaml"  # by any way: its folder is a run's, and may be somebody else's
ALL, INITIAL = "all", "initial"  # choices of --checkpoint beyond those of one checkpoint


@dataclass(frozen=True)
class Weights:
    """One policy: a step of a run, or (step 0) the configuration's own model."""

    step: int
    folder: Path | None = None  # None: `model` of the configuration

    @property
    def is_adapter(self) -> bool:
        """True if the folder holds an adapter, which needs the configuration's model as its base."""
        return self.folder is not None and is_adapter(self.folder)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "Weights":
        return cls(checkpoint.state.step, checkpoint.model_path)


@dataclass(frozen=True)
class Subject:
    """A configuration as it was written, and the weights to evaluate with it, ordered by step."""

    name: str  # for the output folder
    source: str  # prefix of messages about the configuration
    data: dict[str, Any]
    weights: tuple[Weights, ...]
    notices: tuple[str, ...] = ()
    is_run: bool = False

    @property
    def is_own(self) -> bool:
        """True for a configuration that the user wrote, which may name code as it may for `train`."""
        return Path(self.source).suffix in YAML and Path(self.source).name != RUN_CONFIG


def find_subject(target: str, checkpoint: str | None = None) -> Subject:
    """Return the CONFIG, RUN or MODEL that `target` names.

    Args:
        checkpoint: for a run: `last` (the default), `best`, `all`, `initial` or a checkpoint's name.

    Raises:
        RunError: `target` is none of them; says what was looked for.
        ConfigError: the YAML file cannot be read.
    """
    path = Path(target).expanduser()
    if path.suffix in YAML:
        _refuse_checkpoint(target, "a configuration", checkpoint)
        data = read_config(path)
        return Subject(path.stem, target, data, (_initial(data),))
    if (path / RUN_CONFIG).is_file():
        return _run_subject(RunDirectory(path), checkpoint or LAST)
    if (path.parent.parent / RUN_CONFIG).is_file() and path.parent.name == "checkpoints" and path.is_dir():
        _refuse_checkpoint(target, "a checkpoint", checkpoint)
        return _run_subject(RunDirectory(path.parent.parent), path.name)
    if "/" in target and not path.exists() and path.parent.is_dir():  # or else it would be sought on the hub
        nearest = nearest_name(path.name, sorted(entry.name for entry in path.parent.iterdir()))
        hint = f"; did you mean {path.parent / nearest}?" if nearest else ""
        raise RunError(f"{target}: no such run or model folder in {path.parent}{hint}")
    if is_adapter(path):
        _refuse_checkpoint(target, "an adapter", checkpoint)
        return _adapter_subject(path)
    if (path / "config.json").is_file() or not is_local(target):
        _refuse_checkpoint(target, "a model", checkpoint)
        return _model_subject(str(path) if path.exists() else target)
    raise RunError(
        f"{target}: nothing to evaluate; give a configuration (a .yaml file), a run's folder (with a "
        "config.yaml), a model's folder (with a config.json), an adapter's (with an adapter_config.json), or a "
        "model on the hub as owner/name"
    )


def _refuse_checkpoint(target: str, what: str, checkpoint: str | None) -> None:
    if checkpoint is not None:
        raise RunError(f"--checkpoint: {target} is {what}; only a run's folder has checkpoints to choose from")


def _model_subject(target: str) -> Subject:
    """Return a bare model with the configuration's defaults.

    `min_tokens` is 0, because its default is meant for training: here a model may end its response anywhere.
    """
    data: dict[str, Any] = {"model": {"path": target}, "sampling": {"min_tokens": 0}}
    return Subject(Path(target).name, target, data, (Weights(0),))


def _adapter_subject(folder: Path) -> Subject:
    """Return an adapter in PEFT's format on the base that it names."""
    base, adapter = saved_config(folder)
    subject = _model_subject(base)
    model = {**subject.data["model"], "adapter": adapter.model_dump()}
    data = {**subject.data, "model": model}
    return replace(subject, name=folder.name, source=str(folder), data=data, weights=(Weights(0, folder),))


def _initial(data: dict[str, Any]) -> Weights:
    """Return the weights that a configuration starts from: its model's, or `model.adapter.path` on it."""
    model = data.get("model")
    adapter = model.get("adapter") if isinstance(model, dict) else None
    path = adapter.get("path") if isinstance(adapter, dict) else None
    return Weights(0, Path(path).expanduser() if isinstance(path, str) else None)


def _run_subject(run: RunDirectory, choice: str) -> Subject:
    store = CheckpointStore(run)
    checkpoints = store.all()
    notices = [f"skipped, because it is damaged: {line}" for line in store.damaged]
    data = read_config(run.config_path)
    initial = Weights(0, run.sft) if run.sft.is_dir() else _initial(data)
    chosen = _choose(run, store, checkpoints, choice, initial)
    if choice == ALL:
        notices += _missing(run, data, len(checkpoints) + len(notices), chosen[-1].step)
    return Subject(run.path.resolve().name, str(run.config_path), data, chosen, tuple(notices), True)


def _missing(run: RunDirectory, data: dict[str, Any], num_kept: int, last_step: int) -> list[str]:
    """Return a notice of the checkpoints that a curve lacks because the run deleted them."""
    every_num_steps = make_config(data, (), run.config_path).checkpoint.every_num_steps
    num_made = math.ceil(last_step / every_num_steps)  # the last step need not be a multiple
    if num_kept >= num_made:
        return []
    return [
        f"the run kept {num_kept} of its {num_made} checkpoints; train with checkpoint.keep={num_made} for a "
        "curve of all"
    ]


def _choose(
    run: RunDirectory, store: CheckpointStore, checkpoints: list[Checkpoint], choice: str, initial: Weights
) -> tuple[Weights, ...]:
    if choice == INITIAL:
        return (initial,)
    if not checkpoints:
        raise RunError(
            f"{run.path} has no checkpoint yet; evaluate its initial weights with --checkpoint initial"
        )
    if choice == ALL:  # from the initial weights on, unless there is a checkpoint of step 0
        first = [] if checkpoints[0].state.step == 0 else [initial]
        return (*first, *map(Weights.of, checkpoints))
    return (Weights.of(store.choose(choice, "--checkpoint", (ALL, INITIAL))),)
