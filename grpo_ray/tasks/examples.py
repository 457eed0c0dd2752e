"""What a task is made of."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Example:
    """A question, before any template, and the answer that rewards compare with."""

    question: str
    ground_truth: str
