"""Tasks: where questions and ground truths come from, and the order in which they are asked."""

from collections.abc import Mapping
from dataclasses import replace

from grpo_ray.config.task import (
    ArithmeticTaskConfig,
    ExamplesTaskConfig,
    KeywordsTaskConfig,
    MixtureTaskConfig,
    PlainTask,
    SortingTaskConfig,
    Task,
)
from grpo_ray.tasks.arithmetic import arithmetic_examples
from grpo_ray.tasks.curriculum import CurriculumOrder
from grpo_ray.tasks.duplicates import distinct, drop_duplicates, keep_validation_out
from grpo_ray.tasks.examples import Example, ExampleSets
from grpo_ray.tasks.files import Fields, read_examples
from grpo_ray.tasks.keywords.examples import keyword_examples
from grpo_ray.tasks.keywords.pairs import read_pairs
from grpo_ray.tasks.prompt_order import EpochOrder, MixtureOrder
from grpo_ray.tasks.sorting import sorting_examples
from grpo_ray.tasks.sources import train_source, validation_source


def parts_of(task: Task) -> dict[str, PlainTask]:
    """The tasks that a task is made of, by `Example.task`; only a mixture has more than itself, named ""."""
    if isinstance(task, MixtureTaskConfig):
        return {name: part.task for name, part in task.parts.items()}
    return {"": task}


def load_examples(task: Task, seed: int) -> ExampleSets:
    """The task's train and validation examples, part after part; the seed matters to generated tasks only.

    Raises:
        ValueError: names the file, and the line where one is wrong, and the fix.
    """
    sets = {name: _load_part(part, seed) for name, part in parts_of(task).items()}
    return join_parts(keep_validation_out(sets))


def load_validation(task: Task, seed: int, limit: int | None = None) -> ExampleSets:
    """The validation examples alone, `limit` of each part at most; files for training are not read.

    Raises:
        ValueError: as `load_examples`.
    """
    return join_parts({name: _validation_of(part, seed, limit) for name, part in parts_of(task).items()})


def join_parts(sets: Mapping[str, ExampleSets]) -> ExampleSets:
    """One after another, each example and notice with the name of its part."""
    train = [_named(name, example) for name, part in sets.items() for example in part.train]
    validation = [_named(name, example) for name, part in sets.items() for example in part.validation]
    lines = [f"{name}: {line}" if name else line for name, part in sets.items() for line in part.notices]
    return ExampleSets(train, validation, tuple(lines))


def _named(name: str, example: Example) -> Example:
    return example if example.task == name else replace(example, task=name)


def _load_part(task: PlainTask, seed: int) -> ExampleSets:
    if isinstance(task, SortingTaskConfig):
        return ExampleSets(*sorting_examples(task, seed))
    if isinstance(task, ArithmeticTaskConfig):
        return ExampleSets(*arithmetic_examples(task, seed))
    if isinstance(task, KeywordsTaskConfig):
        return keyword_examples(task, seed)
    return _read_examples(task)


def _validation_of(task: PlainTask, seed: int, limit: int | None) -> ExampleSets:
    num_rows = task.num_validation_prompts if limit is None else min(limit, task.num_validation_prompts)
    notices: list[str] = []
    if isinstance(task, ExamplesTaskConfig):
        source = validation_source(task)
        examples, notices = read_examples(source, _fields(task), limit=num_rows)
        if task.duplicates == "drop":
            examples, dropped = distinct(examples, source.name)
            notices = [*notices, *dropped]
    elif isinstance(task, KeywordsTaskConfig) and task.validation_path is not None:
        examples = [pair.example for pair in read_pairs(task.validation_path, num_rows)]
    else:
        examples = list(_load_part(task, seed).validation[:num_rows])
    return ExampleSets([], examples, tuple(notices))


def _fields(task: ExamplesTaskConfig) -> Fields:
    return Fields(task.question_field, task.answer_field, task.answer_marker, task.answer_is_boxed)


def _read_examples(task: ExamplesTaskConfig) -> ExampleSets:
    fields = _fields(task)
    train_from, validation_from = train_source(task), validation_source(task)
    train, train_notices = read_examples(train_from, fields)
    validation, notices = read_examples(validation_from, fields, limit=task.num_validation_prompts)
    sets = ExampleSets(train, validation)
    if task.duplicates == "drop":
        sets = drop_duplicates(train, validation, train_from.name, validation_from.name)
    return replace(sets, notices=(*train_notices, *notices, *sets.notices))


def make_order(task: Task, num_examples: Mapping[str, int], seed: int) -> EpochOrder:
    """The order in which the training examples are asked.

    Args:
        num_examples: of each part.
    """
    orders = {name: _part_order(part, num_examples[name], seed) for name, part in parts_of(task).items()}
    if isinstance(task, MixtureTaskConfig):
        return MixtureOrder({name: (order, task.parts[name].weight) for name, order in orders.items()}, seed)
    return orders[""]


def _part_order(task: PlainTask, num_examples: int, seed: int) -> EpochOrder:
    if task.curriculum is not None:
        return CurriculumOrder(num_examples, seed, task.curriculum)
    return EpochOrder(num_examples, seed)
