"""Configuration fields of a wrong type, every one of them, and wrong command lines."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from grpo_ray.config import Config
from grpo_ray.config.loading import ConfigError, load_config
from grpo_ray.config.schema import sections_of
from grpo_ray.config.section import Section
from grpo_ray.tools.cli import main

# ---- the configuration ----

TASKS = {
    "sorting": "task={kind: sorting}",
    "arithmetic": "task={kind: arithmetic}",
    "keywords": "task={kind: keywords}",
    "file": "task={kind: file, train_path: a.jsonl, validation_path: b.jsonl}",
    "mixture": "task={kind: mixture, parts: {one: {task: {kind: sorting}}, two: {task: {kind: arithmetic}}}}",
}


def leaves(section: type[Section], path: str) -> Iterator[tuple[str, Any]]:
    """Every field that holds a value rather than fields, with its annotation."""
    for name, field in section.model_fields.items():
        inner = sections_of(field.annotation)
        for candidate in inner:
            yield from leaves(candidate, f"{path}{name}.")
        if not inner:
            yield f"{path}{name}", field.annotation


LEAVES = sorted(set(leaves(Config, "")), key=lambda leaf: leaf[0])


def task_with(path: str) -> str:
    """A task of a kind that has the field."""
    name = path.split(".")[1]
    sections = sections_of(Config.model_fields["task"].annotation)
    kind = next(s.model_fields["kind"].default for s in sections if name in s.model_fields)
    return TASKS[kind]


def is_text(annotation: Any) -> bool:
    return str in (annotation, *get_args(annotation))


@pytest.mark.parametrize(("path", "annotation"), LEAVES, ids=[path for path, _ in LEAVES])
def test_every_field_refuses_a_wrong_type(tmp_path: Path, path: str, annotation: Any) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {tiny: {}}\ntask: {kind: sorting}\n")
    base = [task_with(path)] if path.startswith("task.") else []
    for value in ("{x: 1}", "[[1]]", "5" if is_text(annotation) else "nonsense"):
        with pytest.raises(ConfigError) as caught:
            load_config(file, [*base, f"{path}={value}"])
        message = str(caught.value)
        assert any(text.strip().startswith(path) for text in message.splitlines()), message
        assert "is not valid; allowed: " in message


def test_the_walk_finds_the_fields() -> None:
    paths = [path for path, _ in LEAVES]
    assert len(paths) > 90
    assert {"run.seed", "model.tiny.warmup.num_steps", "task.long_prompts", "task.num_digits"} <= set(paths)
    assert {"task.parts", "task.curriculum.min_weight", "task.operations"} <= set(paths)


# ---- the command line ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["trian", "run.yaml"], "invalid choice: 'trian'"),
        (["train"], "the following arguments are required: CONFIG"),
        (["check"], "the following arguments are required: CONFIG"),
        (["check", "run.yaml", "--verbsoe"], "unrecognized arguments: --verbsoe"),
        (["train", "run.yaml", "-x"], "unrecognized arguments: -x"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
