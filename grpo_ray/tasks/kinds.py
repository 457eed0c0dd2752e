"""The registry of the kinds of tasks.

A new kind is a section in config/task.py, a module like sorting.py, and one entry in `KINDS`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from grpo_ray.config.section import Section
from grpo_ray.config.task import ReasoningGymTaskConfig, Task
from grpo_ray.tasks import arithmetic, dataset, keywords, sorting
from grpo_ray.tasks.examples import ExampleSets, Pairs

ConfigT = TypeVar("ConfigT", bound=Section)


@dataclass(frozen=True)
class TaskKind(Generic[ConfigT]):
    """The functions of a kind of task, each of its configuration."""

    load: Callable[[ConfigT, int], ExampleSets]
    """(configuration, seed) to the train and validation examples."""
    load_validation: Callable[[ConfigT, int, int], ExampleSets] | None = None
    """(configuration, seed, limit) to the first validation examples alone; None: `load` is cheap enough."""
    warmup_pairs: Callable[[ConfigT, int, int], Pairs] | None = None
    """(configuration, seed, number) to (question, response) pairs that `model.tiny` is warmed up with;
    None: no tiny model can be built for the kind."""
    max_warmup_pairs: Callable[[ConfigT], int] | None = None
    """Upper bound of the number above which `warmup_pairs` raises; None: it returns fewer pairs instead."""


def _reasoning_gym_examples(config: ReasoningGymTaskConfig, seed: int) -> ExampleSets:
    from grpo_ray.tasks.reasoning_gym import reasoning_gym_examples  # here, because its package takes seconds

    return reasoning_gym_examples(config, seed)


DATASET = TaskKind(dataset.dataset_examples, dataset.dataset_validation, dataset.dataset_warmup)

KINDS: dict[str, TaskKind[Any]] = {
    "sorting": TaskKind(
        sorting.sorting_examples, warmup_pairs=sorting.warmup_pairs, max_warmup_pairs=sorting.num_fresh
    ),
    "arithmetic": TaskKind(arithmetic.arithmetic_examples, warmup_pairs=arithmetic.warmup_pairs),
    "keywords": TaskKind(
        keywords.keyword_examples, keywords.keyword_validation, warmup_pairs=keywords.warmup_pairs
    ),
    "reasoning_gym": TaskKind(_reasoning_gym_examples),
    "episodes": TaskKind(dataset.episode_examples, warmup_pairs=dataset.episode_warmup),
    "file": DATASET,
    "gsm8k": DATASET,
    "math": DATASET,
}


# ---- the pairs that a tiny model is taught before GRPO ----

TOKENIZER_PAIRS = 1000


def check_warmup(task: Task, num_pairs: int = 0) -> None:
    """Refuse a task without `num_pairs` warm-up pairs: a tiny model's tokenizer and habits come from them.

    Raises:
        ValueError: the task's kind has no pairs, or too few.
    """
    with_pairs = [name for name, kind in KINDS.items() if kind.warmup_pairs is not None]
    if task.kind not in with_pairs:
        raise ValueError(
            f"model.tiny: it is built for a task of kind {' or '.join(with_pairs)}, not {task.kind}; "
            "set model.path instead"
        )
    kind = KINDS[task.kind]
    if kind.warmup_pairs and kind.max_warmup_pairs and num_pairs > kind.max_warmup_pairs(task):
        kind.warmup_pairs(task, 0, num_pairs)  # raises


def warmup_pairs(task: Task, seed: int, num_pairs: int) -> Pairs:
    """Return (question, response) pairs, before any template; fewer if the task has no more.

    Raises:
        ValueError: the task has none, or its fields leave too few.
    """
    check_warmup(task)
    make_pairs = KINDS[task.kind].warmup_pairs
    assert make_pairs is not None
    return make_pairs(task, seed, num_pairs)


def tokenizer_pairs(task: Task, seed: int) -> Pairs:
    """Return the pairs that the tokenizer is learned from.

    Raises:
        ValueError: there is none.
    """
    max_pairs = KINDS[task.kind].max_warmup_pairs
    num_pairs = TOKENIZER_PAIRS if max_pairs is None else min(TOKENIZER_PAIRS, max_pairs(task))
    return warmup_pairs(task, seed, num_pairs)
