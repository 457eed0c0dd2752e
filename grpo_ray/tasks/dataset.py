"""The kinds of tasks with examples from files, local or in a dataset on the hub."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from grpo_ray.config.reward import is_own
from grpo_ray.config.task import ExamplesTaskConfig
from grpo_ray.rewards.answer_formats import written
from grpo_ray.tasks.duplicates import distinct, drop_duplicates
from grpo_ray.tasks.examples import Example, ExampleSets, Pairs
from grpo_ray.tasks.files import Fields, num_rows, read_examples
from grpo_ray.tasks.sources import Source, train_source, validation_source

GSM8K_MARKER = "####"


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
    notices += [
        *_unused(validation_from, len(validation), task.num_validation_prompts),
        *_marked(train, fields),
    ]
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


def dataset_warmup(task: ExamplesTaskConfig, seed: int, num_pairs: int) -> Pairs:
    """Draw (question, response) pairs for a tiny model: half with the example's own truth, half with another's.

    They teach the format, and to answer as other questions are answered; the model sees the training questions.
    """
    examples, rng = dataset_examples(task, seed).train, random.Random(f"dataset-warmup/{seed}")
    pairs = []
    for _ in range(num_pairs):
        example = rng.choice(examples)
        answered = example if rng.random() < 0.5 else rng.choice(examples)
        pairs.append((example.question, written(task.reward, answered.ground_truth)))
    return pairs


def _unused(source: Source, num_read: int, limit: int) -> Iterator[str]:
    """Say that only the first rows are used to validate with."""
    if num_read == limit and (number := sum(map(num_rows, source.files))) > num_read:
        field = "task.num_validation_prompts"
        yield f"{source.name}: the first {num_read:,} of its {number:,} rows are validated with ({field})"


def _marked(train: Sequence[Example], fields: Fields) -> Iterator[str]:
    """Say that truths look like whole solutions of GSM8K."""
    is_whole = fields.marker is None and not fields.is_boxed
    if is_whole and sum(GSM8K_MARKER in example.ground_truth for example in train) > len(train) / 2:
        yield (
            f"most ground truths contain {GSM8K_MARKER} (see {train[0].place}): if the answer follows it, "
            f'set task.answer_marker: "{GSM8K_MARKER}"; now the whole text is the ground truth'
        )


def _fields(task: ExamplesTaskConfig) -> Fields:
    return Fields(
        task.question_field, task.answer_field, task.answer_marker, task.answer_is_boxed, is_own(task.reward)
    )
