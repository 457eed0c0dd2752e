"""A user's reward functions with the faults that users have."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _hang() -> float:
    while True:
        pass


FAULTS: dict[str, Callable[[], Any]] = {
    "nan": lambda: float("nan"),
    "none": lambda: None,
    "raises": lambda: {"no": "reward"}["boom"],
    "hangs": _hang,
    "writes": lambda: Path("/tmp/written-by-a-reward.txt").write_text("x"),
}


def always(response: str, ground_truth: str, *, fault: str) -> Any:
    return FAULTS[fault]()


def sometimes(response: str, ground_truth: str, *, fault: str) -> Any:
    return FAULTS[fault]() if sum(map(ord, response)) % 3 == 0 else 0.5


def while_there_is(response: str, ground_truth: str, *, path: str) -> float:
    """Fail as long as a file exists, as a judge does that cannot be reached."""
    if os.path.exists(path):
        raise ConnectionError("the judge is away")
    return len(response) % 2
