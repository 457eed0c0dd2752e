"""The types that tasks are made of."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Pairs = list[tuple[str, str]]
"""(question, response) pairs that a tiny model is warmed up with."""


@dataclass(frozen=True)
class Example:
    """A question, before any template, and the answer that rewards compare responses with."""

    question: str
    ground_truth: str
    place: str = field(default="", compare=False)  # its file and line, for messages; empty if generated
    task: str = ""  # the part of a mixture that it belongs to
    seed: int = field(default=0, compare=False)  # of an episode's environment: one per prompt and epoch
    facts: str = ""  # JSON: `row`, and the `fields` of question and answer, where code of the user's may ask

    @property
    def row(self) -> dict[str, Any]:
        """The columns of the example's row other than question and answer; empty for generated tasks."""
        row: dict[str, Any] = json.loads(self.facts).get("row", {}) if self.facts else {}
        return row


@dataclass(frozen=True)
class ExampleSets:
    """A task's examples, and notices about those that were left out."""

    train: Sequence[Example]
    validation: Sequence[Example]
    notices: tuple[str, ...] = ()


def counted(number: int, noun: str) -> str:
    """Return the number with its noun: `1 question`, `1,200 questions`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
