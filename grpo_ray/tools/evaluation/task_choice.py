"""The task of an evaluation: the configuration's, or another one chosen on the command line."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_ray.config import Config
from grpo_ray.config.schema import sections_of
from grpo_ray.config.section import Section
from grpo_ray.config.task import ExamplesTaskConfig
from grpo_ray.errors import RunError
from grpo_ray.tasks.files import read_rows
from grpo_ray.tasks.keywords.pairs import FIELDS as PAIR_FIELDS
from grpo_ray.tools.look import EvaluationOptions

ALL_ROWS = 2**31
FILE_SUFFIXES = (".jsonl", ".parquet")
# No dataset on the hub has a name that ends so.
OTHER_SUFFIXES = (".json", ".csv", ".tsv", ".txt", ".arrow", ".gz", ".zst", ".zip")
# The mathematics reward that reads the format each prompt asks for.
REWARD_OF_PROMPT = {"r1_zero": "r1_zero", "question_only": "question_only", "chat": "question_only"}


def choose_task(data: Mapping[str, Any], options: EvaluationOptions) -> dict[str, Any]:
    """Return the configuration's mapping with the chosen task, not yet validated.

    Raises:
        RunError: there is no task, the options contradict each other, or a file's fields are unknown.
        ValueError: a file cannot be read.
    """
    task = data.get("task")
    if options.task is not None:
        task = _replaced(task, options)
    elif options.question_field or options.answer_field:
        raise RunError("--question-field, --answer-field: they need a file; give it with --task")
    if not isinstance(task, Mapping):
        raise RunError("--task: a model alone has no questions; give a task kind or a file")
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
    section = _kinds().get(task.get("kind", ""))
    if section is None or "validation_path" not in section.model_fields:
        return False
    return issubclass(section, ExamplesTaskConfig) or task.get("validation_path") is not None


def _kinds() -> dict[str, type[Section]]:
    sections = sections_of(Config.model_fields["task"].annotation)
    return {section.model_fields["kind"].default: section for section in sections}


def _reward(task: Mapping[str, Any]) -> Any:
    section = _kinds().get(task.get("kind", ""))
    default = section.model_fields["reward"].default if section and "reward" in section.model_fields else None
    return task.get("reward", default)


def _replaced(task: Any, options: EvaluationOptions) -> dict[str, Any]:
    name = options.task
    assert name is not None
    section = _kinds().get(name)
    if section is None:
        return _of_file(name, options)
    if options.question_field or options.answer_field:
        raise RunError(f"--question-field, --answer-field: they need a file, and --task {name} is not a file")
    if isinstance(task, Mapping) and task.get("kind") == name:
        return {**task, "num_validation_prompts": ALL_ROWS} if _is_of_files(task) else dict(task)
    if name in ("file", "mixture"):
        raise RunError(f"--task {name}: name the file, such as --task questions.jsonl, or give a configuration")
    if not issubclass(section, ExamplesTaskConfig):
        return {"kind": name, **({"num_validation_prompts": options.limit} if options.limit else {})}
    fields = section.model_fields
    return {"kind": name, **_one_set(fields["validation_path"].default, fields["validation_split"].default)}


def _of_file(path: str, options: EvaluationOptions) -> dict[str, Any]:
    """Return the task of a local file or hub dataset, with the given or recognised fields."""
    _refuse_other_files(path)
    if options.question_field or options.answer_field:
        names = {"question_field": options.question_field, "answer_field": options.answer_field}
        return {"kind": "file", **{key: name for key, name in names.items() if name}, **_one_set(path)}
    if Path(path).suffix not in FILE_SUFFIXES:
        return {"kind": "file", **_one_set(path)}
    return _recognised(Path(path))


def _refuse_other_files(path: str) -> None:
    """Refuse everything but .jsonl and .parquet files and possible names of hub datasets."""
    file = Path(path)
    if file.suffix in FILE_SUFFIXES:
        return
    is_file_name = file.suffix.lower() in (*FILE_SUFFIXES, *OTHER_SUFFIXES) or file.exists()
    if is_file_name or ("/" in path and file.parent.is_dir()):
        raise RunError(
            f"--task: {path!r} is not a .jsonl or .parquet file; convert or rename it, or correct the path"
        )
    if path.count("/") != 1:
        raise RunError(
            f"--task: {path!r} is not a task kind ({', '.join(_kinds())}), a .jsonl or .parquet file, or a "
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
    for field in ("question", "problem", "prompt"):
        if field in row and "answer" in row:
            return {"kind": "file", "question_field": field, **_one_set(str(path))}
    raise RunError(
        f"{path}: its fields are {', '.join(map(str, row)) or 'none'}; name those of the question and the "
        "answer with --question-field and --answer-field"
    )
