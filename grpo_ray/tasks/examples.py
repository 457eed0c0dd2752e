"""What a task is made of."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Example:
    """A question, before any template, and the answer that rewards compare with."""

    question: str
    ground_truth: str
    place: str = field(default="", compare=False)  # its file and line, for messages; empty if generated
    task: str = ""  # the part of a mixture that it comes from


@dataclass(frozen=True)
class ExampleSets:
    """A task's examples, and a line on whatever was left out of them."""

    train: Sequence[Example]
    validation: Sequence[Example]
    notices: tuple[str, ...] = ()


def counted(number: int, noun: str) -> str:
    """`1 question`, `1,200 questions`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
