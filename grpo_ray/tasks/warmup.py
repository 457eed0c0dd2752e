"""What a model built here is taught before GRPO: the warm-up pairs of each kind of task."""

from collections.abc import Callable
from typing import Any

from grpo_ray.config.task import SortingTaskConfig, Task
from grpo_ray.tasks import arithmetic, sorting
from grpo_ray.tasks.keywords import examples as keywords

Pairs = list[tuple[str, str]]
TOKENIZER_PAIRS = 1000

_BY_KIND: dict[str, Callable[[Any, int, int], Pairs]] = {
    "sorting": sorting.warmup_pairs,
    "arithmetic": arithmetic.warmup_pairs,
    "keywords": keywords.warmup_pairs,
}


def check_warmup(task: Task) -> None:
    """Refuse a task that a model built here could not be made for: its tokenizer and habits come from pairs.

    Raises:
        ValueError: the task's kind has no pairs.
    """
    if task.kind not in _BY_KIND:
        raise ValueError(
            f"model.tiny: it is built for a task of kind {' or '.join(_BY_KIND)}, not {task.kind}; "
            "set model.path instead"
        )


def warmup_pairs(task: Task, seed: int, num_pairs: int) -> Pairs:
    """(question, response) pairs, before any template; fewer where the task has no more.

    Raises:
        ValueError: the task has none, or its fields leave too few.
    """
    check_warmup(task)
    return _BY_KIND[task.kind](task, seed, num_pairs)


def tokenizer_pairs(task: Task, seed: int) -> Pairs:
    """Those that the tokenizer is learned from.

    Raises:
        ValueError: there is none.
    """
    num_pairs = TOKENIZER_PAIRS
    if isinstance(task, SortingTaskConfig):
        num_pairs = min(num_pairs, sorting.num_fresh(task))  # few digits make few numbers
    return warmup_pairs(task, seed, num_pairs)
