"""Reward functions as TRL's GRPOTrainer calls them; nothing in them knows of grpo_ray."""

import re
from typing import Any


def correctness(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """Return 2 where the completion ends with the answer, a column of the data: `1 + 0 = ` has it, too."""
    pairs = zip(completions, answer, strict=True)
    return [2.0 if completion.split()[-1:] == [text] else 0.0 for completion, text in pairs]


def only_digits(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float | None]:
    """Return 1 for a completion of digits alone, and None, so no opinion, for an empty one."""
    return [None if not c.strip() else float(bool(re.fullmatch(r"\s*\d+\s*", c))) for c in completions]
