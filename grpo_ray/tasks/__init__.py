"""Tasks: questions and ground truths, the prompts made of them, and the order in which they are asked.

    kinds.py           every kind of task, by the name in `task.kind`; a new kind is one entry there
    arithmetic.py, keywords.py, sorting.py   kinds that generate their questions
    dataset.py         kinds that read them from files (files.py), here or on the hub (sources.py)
    prompts.py         from a question to a prompt: chat templates, and the texts in templates/
    prompt_order.py    which example each group asks, epoch after epoch, and the prompts in that order

The functions below are the entry: the examples of a configured task, and their order.
"""

from collections.abc import Mapping
from dataclasses import replace

from grpo_ray.config.task import MixtureTaskConfig, PlainTask, Task, parts_of
from grpo_ray.tasks.dataset import keep_validation_out
from grpo_ray.tasks.examples import Example, ExampleSets
from grpo_ray.tasks.kinds import KINDS
from grpo_ray.tasks.prompt_order import CurriculumOrder, EpochOrder, MixtureOrder


def load_examples(task: Task, seed: int) -> ExampleSets:
    """Return the train and validation examples, part after part; only generated tasks depend on the seed.

    Raises:
        ValueError: names the file, the wrong line if there is one, and how to fix it.
    """
    sets = {name: KINDS[part.kind].load(part, seed) for name, part in parts_of(task).items()}
    return join_parts(keep_validation_out(sets))


def load_validation(task: Task, seed: int, limit: int | None = None) -> ExampleSets:
    """Return only the validation examples, at most `limit` of each part; else as `load_examples`.

    Files for training are not read.
    """
    return join_parts({name: _load_validation(part, seed, limit) for name, part in parts_of(task).items()})


def join_parts(sets: Mapping[str, ExampleSets]) -> ExampleSets:
    """Concatenate the parts; each example and notice gets the name of its part."""
    train = [_named(name, example) for name, part in sets.items() for example in part.train]
    validation = [_named(name, example) for name, part in sets.items() for example in part.validation]
    lines = [f"{name}: {line}" if name else line for name, part in sets.items() for line in part.notices]
    return ExampleSets(train, validation, tuple(lines))


def make_order(task: Task, num_examples: Mapping[str, int], seed: int) -> EpochOrder:
    """Return the order in which the training examples are asked.

    Args:
        num_examples: by part.
    """
    orders: dict[str, EpochOrder] = {}
    for name, part in parts_of(task).items():
        if part.curriculum is None:
            orders[name] = EpochOrder(num_examples[name], seed)
        else:
            orders[name] = CurriculumOrder(num_examples[name], seed, part.curriculum)
    if isinstance(task, MixtureTaskConfig):
        return MixtureOrder({name: (order, task.parts[name].weight) for name, order in orders.items()}, seed)
    return orders[""]


def _load_validation(task: PlainTask, seed: int, limit: int | None) -> ExampleSets:
    kind = KINDS[task.kind]
    num_examples = task.num_validation_prompts if limit is None else min(limit, task.num_validation_prompts)
    if kind.load_validation is not None:
        return kind.load_validation(task, seed, num_examples)
    return ExampleSets([], kind.load(task, seed).validation[:num_examples])


def _named(name: str, example: Example) -> Example:
    return example if example.task == name else replace(example, task=name)
