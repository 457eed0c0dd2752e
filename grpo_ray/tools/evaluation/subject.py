"""The subject of an evaluation, and its questions: those of the configuration, or others on the command line.

The subject is the model of a configuration, a run's checkpoints, or any model.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from grpo_ray.config import Config
from grpo_ray.config.loading import make_config, read_config
from grpo_ray.config.schema import kind_of, nearest_name, sections_of
from grpo_ray.config.section import Section
from grpo_ray.config.task import ExamplesTaskConfig
from grpo_ray.errors import RunError
from grpo_ray.learning.model_files import is_local
from grpo_ray.records.adapter_files import is_adapter, saved_config
from grpo_ray.records.checkpoint import LAST, Checkpoint, CheckpointStore
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.tasks.files import read_rows
from grpo_ray.tasks.keywords import FIELDS as PAIR_FIELDS
from grpo_ray.tasks.sources import FILE_KINDS, LOCAL_SUFFIXES
from grpo_ray.tools.look import EvaluationOptions

YAML = (".yaml", ".yml")
RUN_CONFIG = "config.yaml"  # by any way: its folder is a run's, and may be somebody else's
ALL, INITIAL = "all", "initial"  # choices of --checkpoint beyond those of one checkpoint
ALL_ROWS = 2**31
# No dataset on the hub has a name that ends so.
OTHER_SUFFIXES = (".json", ".tsv", ".txt", ".arrow", ".gz", ".zst", ".zip")
# The mathematics reward that reads the format each prompt asks for.
REWARD_OF_PROMPT = {"r1_zero": "r1_zero", "question_only": "question_only", "chat": "question_only"}


@dataclass(frozen=True)
class Weights:
    """One policy: a step of a run, or (step 0) the configuration's own model."""

    step: int
    folder: Path | None = None  # None: `model` of the configuration, with its adapter if that has a path
    is_adapter: bool = field(init=False)  # now: a run that is still training may delete the folder

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_adapter", self.folder is not None and is_adapter(self.folder))

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "Weights":
        return cls(checkpoint.state.step, checkpoint.path)


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
        return Subject(path.stem, target, data, (Weights(0),))
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
        f"{target}: nothing to evaluate. Give a .yaml file, a run's folder (with config.yaml), a model's "
        "(config.json), an adapter's (adapter_config.json), or a model on the hub as owner/name"
    )


def _refuse_checkpoint(target: str, what: str, checkpoint: str | None) -> None:
    if checkpoint is not None:
        raise RunError(f"--checkpoint: {target} is {what}; only a run's folder has checkpoints to choose from")


def _model_subject(target: str, **model: Any) -> Subject:
    """Return a bare model, with these fields of its section, and the configuration's defaults.

    `min_tokens` is 0, because its default is meant for training: here a model may end its response anywhere.
    """
    data: dict[str, Any] = {"model": {"path": target, **model}, "sampling": {"min_tokens": 0}}
    return Subject(Path(target).name, target, data, (Weights(0),))


def _adapter_subject(folder: Path) -> Subject:
    """Return an adapter in PEFT's format on the base that it names."""
    base, adapter = saved_config(folder)
    subject = _model_subject(base, adapter=adapter.model_dump())
    return replace(subject, name=folder.name, source=str(folder), weights=(Weights(0, folder),))


def _run_subject(run: RunDirectory, choice: str) -> Subject:
    store = CheckpointStore(run)
    checkpoints, notices = store.all(), store.skipped
    data = read_config(run.config_path)
    initial = Weights(0, run.sft if run.sft.is_dir() else None)
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


def choose_task(data: Mapping[str, Any], options: EvaluationOptions) -> dict[str, Any]:
    """Return the configuration's mapping with the chosen task, not yet validated.

    Raises:
        RunError: there is no task, the options contradict each other, or a file's fields are unknown.
        ValueError: a file cannot be read.
    """
    task = data.get("task")
    if options.task is not None:
        task = _replaced(task if isinstance(task, Mapping) else {}, options.task, options)
    elif options.question_field or options.answer_field:
        raise RunError("--question-field, --answer-field need a file; give it with --task")
    if not isinstance(task, Mapping):
        raise RunError("--task: a model has no questions; give a task kind or a file")
    task = dict(task)
    _refuse_for_mixture(task, options)
    if options.prompt is not None:
        task["prompt"] = options.prompt
    if options.reward is not None:
        task["reward"] = options.reward
    elif options.prompt in REWARD_OF_PROMPT and _reward(task) in REWARD_OF_PROMPT.values():
        task["reward"] = REWARD_OF_PROMPT[options.prompt]
    if options.limit is not None and _is_of_files(task):
        task["num_validation_prompts"] = options.limit
    return {**data, "task": task}


def _refuse_for_mixture(task: Mapping[str, Any], options: EvaluationOptions) -> None:
    given = [name for name in ("prompt", "reward") if getattr(options, name) is not None]
    if task.get("kind") == "mixture" and given:
        parts = task.get("parts")
        names = " or ".join(map(str, parts)) if isinstance(parts, Mapping) and parts else "NAME"
        raise RunError(
            f"--{given[0]}: each part of a mixture has its own; set task.parts.NAME.task.{given[0]}=... "
            f"for NAME {names}"
        )


def _is_of_files(task: Mapping[str, Any]) -> bool:
    """Return whether the task's validation prompts are rows of a file rather than generated."""
    section = section_of(task)
    if section is None or "validation_path" not in section.model_fields:
        return False
    return issubclass(section, ExamplesTaskConfig) or task.get("validation_path") is not None


def _kinds() -> dict[str, type[Section]]:
    return {kind_of(section): section for section in sections_of(Config.model_fields["task"].annotation)}


def section_of(task: Mapping[str, Any]) -> type[Section] | None:
    """Return the section of a task's kind; None for a kind that there is not."""
    return _kinds().get(str(task.get("kind")))


def _reward(task: Mapping[str, Any]) -> Any:
    section = section_of(task)
    default = section.model_fields["reward"].default if section and "reward" in section.model_fields else None
    return task.get("reward", default)


def _replaced(task: Mapping[str, Any], name: str, options: EvaluationOptions) -> dict[str, Any]:
    """Return the task that `name` stands for in place of the configuration's, which has none if it is empty."""
    section = _kinds().get(name)
    if section is None:
        _refuse_other_files(name)
        if task.get("kind") == "file":
            return {**task, **_fields(options), **_one_set(name)}  # with its prompt, reward and fields
        if task.get("kind") == "episodes":
            raise RunError("--task: episodes make their own questions; set task.examples instead")
        kept = ("prompt", "system_prompt", "reward") if _is_of_files(task) else ()
        own = {key: task[key] for key in kept if key in task}
        if options.question_field or options.answer_field or Path(name).suffix not in LOCAL_SUFFIXES:
            return {"kind": "file", **_fields(options), **_one_set(name), **own}
        return {**_recognised(Path(name)), **own}
    if options.question_field or options.answer_field:
        raise RunError(f"--question-field, --answer-field need a file, but --task {name} is not a file")
    if task.get("kind") == name:
        return {**task, "num_validation_prompts": ALL_ROWS} if _is_of_files(task) else dict(task)
    if name in ("file", "mixture"):
        raise RunError(f"--task {name}: name the file, such as --task questions.jsonl, or give a configuration")
    if not issubclass(section, ExamplesTaskConfig):
        return {"kind": name, **({"num_validation_prompts": options.limit} if options.limit else {})}
    fields = section.model_fields
    return {"kind": name, **_one_set(fields["validation_path"].default, fields["validation_split"].default)}


def _fields(options: EvaluationOptions) -> dict[str, str]:
    names = {"question_field": options.question_field, "answer_field": options.answer_field}
    return {key: name for key, name in names.items() if name}


def _refuse_other_files(path: str) -> None:
    """Refuse everything but .jsonl, .parquet and .csv files and possible names of hub datasets."""
    file = Path(path)
    if file.suffix in LOCAL_SUFFIXES:
        return
    is_file_name = file.suffix.lower() in (*LOCAL_SUFFIXES, *OTHER_SUFFIXES) or file.exists()
    if is_file_name or ("/" in path and file.parent.is_dir()):
        raise RunError(
            f"--task: {path!r} is not a {FILE_KINDS} file; convert or rename it, or correct the path"
        )
    if path.count("/") != 1:
        raise RunError(
            f"--task: {path!r} is not a task kind ({', '.join(_kinds())}), a {FILE_KINDS} file, or a "
            "dataset on the hub (owner/name)"
        )


def _one_set(path: str, split: str = "test") -> dict[str, Any]:
    """Return fields that name the same rows for training and validation, since nothing is trained."""
    return {
        "train_path": path, "validation_path": path, "train_split": split, "validation_split": split,
        "num_validation_prompts": ALL_ROWS, "duplicates": "keep",
    }  # fmt: skip


def _recognised(path: Path) -> dict[str, Any]:
    """Return the task of a file, recognised by its first row: GSM8K, MATH, keyword pairs or similar."""
    _, row = next(read_rows(path, ("every column",)), ("", {}))
    question, answer, solution = row.get("question"), str(row.get("answer")), str(row.get("solution"))
    if question is not None and "####" in answer:
        return {"kind": "gsm8k", "subset": None, **_one_set(str(path))}
    if "problem" in row and r"\boxed" in solution:
        return {"kind": "math", **_one_set(str(path))}
    if all(name in row for name in PAIR_FIELDS):
        paths = {"train_path": str(path), "validation_path": str(path)}
        return {"kind": "keywords", **paths, "num_validation_prompts": ALL_ROWS}
    for name in ("question", "problem", "prompt"):
        if name in row and "answer" in row:
            return {"kind": "file", "question_field": name, **_one_set(str(path))}
    raise RunError(
        f"{path}: its fields are {', '.join(map(str, row)) or 'none'}; name those of the question and the "
        "answer with --question-field and --answer-field"
    )
