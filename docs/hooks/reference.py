"""mkdocs hook: the tables that are made from the code, where a page asks for them by a comment."""

import json
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from grpo_ray.config import Config
from grpo_ray.config_reward import RewardTerm
from grpo_ray.config_schema import describe, resolve, sections_of
from grpo_ray.config_section import Section
from grpo_ray.telemetry.metrics_catalog import METRICS

Location = tuple[str, ...]  # as pydantic's: of a task it holds the kind


def on_page_markdown(markdown: str, **_: Any) -> str:
    for marker, table in (("configuration", configuration_reference), ("metrics", metrics_reference)):
        comment = f"<!-- {marker} reference -->"
        if comment in markdown:
            markdown = markdown.replace(comment, table())
    return markdown


# ---- the configuration ----


def configuration_reference() -> str:
    """A part for every section of the configuration, a row for every field."""
    return "\n\n".join(_section(*found) for found in sections())


def sections() -> Iterator[tuple[str, Location, type[Section]]]:
    """Every section by its heading, depth first, and where it is; each kind of a task has one."""
    yield from _below((), Config)
    # What stands in a list of a union is not found by the way down.
    yield "task.reward[0]", (), RewardTerm


def _below(location: Location, section: type[Section]) -> Iterator[tuple[str, Location, type[Section]]]:
    for name in section.model_fields:
        path, annotation = resolve((*location, name))
        found = sections_of(annotation) or sections_of(_value_of(annotation))
        where = (*location, name) if sections_of(annotation) else (*location, name, "NAME")
        for one in found:
            kind = one.model_fields["kind"].default if len(found) > 1 else None
            heading = ".".join([path, "NAME"]) if where[-1] == "NAME" else path
            heading = f"{heading} (kind: {kind})" if kind else heading
            here = (*where, kind) if kind else where
            if location[:1] == ("task",) and "NAME" in location:
                continue  # a part of a mixture is a task, and stands there already
            yield heading, here, one
            yield from _below(here, one)


def _value_of(annotation: Any) -> Any:
    """What a mapping's names lead to."""
    arguments = getattr(annotation, "__args__", ())
    return arguments[1] if getattr(annotation, "__origin__", None) is dict else None


def _section(heading: str, location: Location, section: type[Section]) -> str:
    lines = [f"## `{heading}`", ""]
    own = section.__doc__
    if own and own != Section.__doc__:
        lines += [" ".join(own.split()), ""]
    lines += ["| field | values | default | |", "|---|---|---|---|"]
    for name, field in section.model_fields.items():
        annotation = resolve((*location, name))[1] if location else field.annotation
        cells = [f"`{name}`", _values(annotation), _default(field), field.description or ""]
        lines.append("| " + " | ".join(map(_cell, cells)) + " |")
    return "\n".join(lines)


def _values(annotation: Any) -> str:
    inside = sections_of(annotation)
    if inside:
        return "a section, below" + (", or null" if type(None) in getattr(annotation, "__args__", ()) else "")
    return describe(annotation)


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
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
    """A table for every area, a row for every name."""
    areas: dict[str, list[str]] = {}
    for name, (unit, meaning) in METRICS.items():
        row = "| " + " | ".join(map(_cell, (f"`{name}`", unit, meaning))) + " |"
        areas.setdefault(name.split("/")[0], []).append(row)
    head = ["", "| name | unit | meaning |", "|---|---|---|"]
    return "\n\n".join("\n".join([f"## {area}", *head, *rows]) for area, rows in areas.items())
