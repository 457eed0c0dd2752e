"""The pairs that a model built here is taught before GRPO, for the kinds of tasks that have any."""

from grpo_ray.config.task import Task
from grpo_ray.tasks.examples import Pairs
from grpo_ray.tasks.kinds import KINDS

TOKENIZER_PAIRS = 1000


def check_warmup(task: Task) -> None:
    """Refuse a task without warm-up pairs: a tiny model's tokenizer and habits come from them.

    Raises:
        ValueError: the task's kind has no pairs.
    """
    with_pairs = [name for name, kind in KINDS.items() if kind.warmup_pairs is not None]
    if task.kind not in with_pairs:
        raise ValueError(
            f"model.tiny: it is built for a task of kind {' or '.join(with_pairs)}, not {task.kind}; "
            "set model.path instead"
        )


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
    check_warmup(task)
    max_pairs = KINDS[task.kind].max_warmup_pairs
    num_pairs = TOKENIZER_PAIRS if max_pairs is None else min(TOKENIZER_PAIRS, max_pairs(task))
    return warmup_pairs(task, seed, num_pairs)
