"""Reward functions as TRL's GRPOTrainer calls them; nothing in them knows of grpo_ray."""

import re
from typing import Any


def correctness(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """Return 2 where the completion has the answer; `answer` is a column of the data."""
    return [
        2.0 if text in completion.split() else 0.0 for completion, text in zip(completions, answer, strict=True)
    ]


def only_digits(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float | None]:
    """Return 1 for a completion of digits alone, and None, so no opinion, for an empty one."""
    return [None if not c.strip() else float(bool(re.fullmatch(r"\s*\d+\s*", c))) for c in completions]
