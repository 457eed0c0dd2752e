"""The kinds of tasks with examples from files, local or in a dataset on the hub."""

from dataclasses import replace

from grpo_ray.config.reward import is_own
from grpo_ray.config.task import ExamplesTaskConfig
from grpo_ray.tasks.duplicates import distinct, drop_duplicates
from grpo_ray.tasks.examples import ExampleSets
from grpo_ray.tasks.files import Fields, read_examples
from grpo_ray.tasks.sources import train_source, validation_source


def dataset_examples(task: ExamplesTaskConfig, seed: int) -> ExampleSets:
    """Read the train and validation examples; the seed changes nothing.

    Raises:
        ValueError: names the file, the wrong line if there is one, and how to fix it.
    """
    fields = _fields(task)
    train_from, validation_from = train_source(task), validation_source(task)
    train, train_notices = read_examples(train_from, fields)
    validation, notices = read_examples(validation_from, fields, limit=task.num_validation_prompts)
    sets = ExampleSets(train, validation)
    if task.duplicates == "drop":
        sets = drop_duplicates(train, validation, train_from.name, validation_from.name)
    return replace(sets, notices=(*train_notices, *notices, *sets.notices))


def dataset_validation(task: ExamplesTaskConfig, seed: int, limit: int) -> ExampleSets:
    """Read only the first `limit` validation examples.

    Raises:
        ValueError: as `dataset_examples`.
    """
    source = validation_source(task)
    examples, notices = read_examples(source, _fields(task), limit=limit)
    if task.duplicates == "drop":
        examples, dropped = distinct(examples, source.name)
        notices = [*notices, *dropped]
    return ExampleSets([], examples, tuple(notices))


def _fields(task: ExamplesTaskConfig) -> Fields:
    return Fields(
        task.question_field, task.answer_field, task.answer_marker, task.answer_is_boxed, is_own(task.reward)
    )
