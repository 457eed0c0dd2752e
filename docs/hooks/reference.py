"""The mkdocs hook that fills in comments of pages.

`<!-- configuration reference -->` and `<!-- metrics reference -->` become tables made from the code,
`<!-- command reference -->` the help of each command, and `<!-- file PATH -->` the text of a file.
"""

import contextlib
import io
import json
import os
import re
import unittest.mock
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from grpo_ray.config import Config
from grpo_ray.config.schema import describe, sections_of
from grpo_ray.config.section import Section
from grpo_ray.tools.cli import COMMANDS, parse
from grpo_ray.watch.metrics_catalog import METRICS


def on_page_markdown(markdown: str, **_: Any) -> str:
    for comment, make in CONTENTS.items():
        if comment in markdown:
            markdown = markdown.replace(comment, make())
    return re.sub(r"^<!-- file ([\w./-]+) -->$", _file, markdown, flags=re.M)


def _file(comment: re.Match[str]) -> str:
    """Return the file that the comment names as a block of code."""
    path = comment[1]
    language = "python" if path.endswith(".py") else "yaml"
    return f'```{language} title="{path}"\n{(Path(__file__).parents[2] / path).read_text()}```'


# ---- the configuration ----


BASIC = (
    "run.name",
    "model.path", "model.tiny", "model.dtype", "model.adapter",
    "task.kind", "task.train_path", "task.validation_path", "task.question_field", "task.answer_field",
    "task.answer_marker", "task.prompt", "task.reward",
    "sampling.max_tokens", "sampling.temperature",
    "algorithm.preset", "algorithm.num_steps", "algorithm.prompts_per_step", "algorithm.samples_per_prompt",
    "generator.num_generators", "generator.num_gpus",
    "learner.learning_rate", "learner.lr_schedule", "learner.micro_batch_tokens", "learner.num_gpus",
    "weight_sync.max_lag", "evaluation.every_num_steps", "checkpoint.every_num_steps",
)  # fmt: skip
"""The keys that most configurations set; the page opens with them."""
HEAD = ["| field | values | default | |", "|---|---|---|---|"]


def configuration_reference() -> str:
    """Return a table of the basic keys, and a folded one for every section of the configuration."""
    every = sections(Config)
    lines = [f"## The {len(BASIC)} keys that most runs need", "", *HEAD]
    for key in BASIC:
        heading, _, name = key.rpartition(".")
        section = every["task (kind: file)" if heading == "task" else heading]
        lines.append(_row(key, section, name))
    return "\n\n".join(["\n".join(lines), *(_section(path, section) for path, section in every.items())])


def sections(top: type[Section]) -> dict[str, type[Section]]:
    """Return every section below `top` by its heading, depth first; each section stands at its first place."""
    found: dict[str, type[Section]] = {}
    _collect("", top, found)
    return found


def _collect(path: str, section: type[Section], found: dict[str, type[Section]]) -> None:
    for name, field in section.model_fields.items():
        for place, inner in _inside(f"{path}.{name}".lstrip("."), field.annotation):
            if inner not in found.values():
                kind = inner.model_fields.get("kind")
                found[f"{place} (kind: {kind.default})" if kind else place] = inner
                _collect(place, inner, found)


def _inside(path: str, annotation: Any) -> Iterator[tuple[str, type[Section]]]:
    """Yield the sections in an annotation, each with its path."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield path, annotation
        return
    inside = {dict: f"{path}.NAME", tuple: f"{path}[N]"}.get(get_origin(annotation), path)
    for argument in get_args(annotation):
        yield from _inside(inside, argument)


def _section(heading: str, section: type[Section]) -> str:
    lines = [f"## `{heading}`", ""]
    if section.__doc__ and section.__doc__ != Section.__doc__:
        lines += [" ".join(section.__doc__.split()), ""]
    table = [*HEAD, *(_row(name, section, name) for name in section.model_fields)]
    number = len(section.model_fields)
    lines += [f'??? note "{number} field{"s" if number > 1 else ""}"', "", *(f"    {line}" for line in table)]
    return "\n".join(lines)


def _row(shown: str, section: type[Section], name: str) -> str:
    field = section.model_fields[name]
    cells = [f"`{shown}`", _values(field), _default(section, field), _meaning(section, name)]
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _values(field: FieldInfo) -> str:
    if sections_of(field.annotation):
        return "a section, below" + (", or null" if NoneType in get_args(field.annotation) else "")
    # pydantic keeps the bounds apart from the type.
    return describe(Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation)


def _meaning(section: type[Section], name: str) -> str:
    """Return the field's docstring, also for a subclass that only changes the default."""
    if name == "kind" and section.__name__.endswith("TaskConfig"):
        return "Kind of the task."
    fields = [base.model_fields.get(name) for base in section.__mro__ if issubclass(base, Section)]
    written = [field.description for field in fields if field is not None and field.description]
    inside = sections_of(section.model_fields[name].annotation)
    return written[0] if written else (inside[0].__doc__ or "" if len(inside) == 1 else "")


def _default(section: type[Section], field: FieldInfo) -> str:
    others = {
        name: other.default for name, other in section.model_fields.items()
    }  # some defaults depend on these
    value = field.get_default(call_default_factory=True, validated_data=others)
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, Section):
        changed = value.model_dump(mode="json", exclude_defaults=True)
        return f"`{json.dumps(changed)}`" if changed else "its defaults"
    return f"`{json.dumps(value)}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# ---- the metrics ----


def metrics_reference() -> str:
    """Return a table for every area, with one row per metric."""
    areas: dict[str, list[str]] = {}
    for name, (unit, meaning) in METRICS.items():
        row = "| " + " | ".join(map(_cell, (f"`{name}`", unit, meaning))) + " |"
        areas.setdefault(name.split("/")[0], []).append(row)
    head = ["", "| name | unit | meaning |", "|---|---|---|"]
    return "\n\n".join("\n".join([f"## {area}", *head, *rows]) for area, rows in areas.items())


# ---- the commands ----


def command_reference() -> str:
    """Return a table of the commands, and the help of each."""
    table = [f"| [`{command.name}`](#grpo-ray-{command.name}) | {command.help} |" for command in COMMANDS]
    helps = [f"## grpo-ray {command.name}\n\n```text\n{_help(command.name)}```" for command in COMMANDS]
    return "\n\n".join(["\n".join(["| command | |", "|---|---|", *table]), *helps])


def _help(command: str) -> str:
    """Return the help that a terminal of 80 columns shows."""
    columns = unittest.mock.patch.dict(os.environ, COLUMNS="80")
    printed = io.StringIO()
    with columns, contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        parse([command, "--help"])
    return printed.getvalue()


CONTENTS = {
    "<!-- command reference -->": command_reference,
    "<!-- configuration reference -->": configuration_reference,
    "<!-- metrics reference -->": metrics_reference,
}
