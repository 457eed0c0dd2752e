"""The examples of episodes: from a function of the user's, or from files."""

from pathlib import Path

from grpo_ray.config.task import EpisodesTaskConfig
from grpo_ray.config.user_code import import_function
from grpo_ray.records.visible_text import encodable
from grpo_ray.tasks.examples import Conversation, Example, ExampleSets, Pairs
from grpo_ray.tasks.files import Fields, read_examples
from grpo_ray.tasks.sources import Source


def episode_examples(task: EpisodesTaskConfig, seed: int) -> ExampleSets:
    """Return the train and validation examples.

    Raises:
        ValueError: names the field or the file, what is wrong, and how to fix it.
    """
    if task.validation_examples is not None:
        return _from_files(task, task.validation_examples)
    found = import_function(task.examples, "task.examples")(seed)
    if not isinstance(found, ExampleSets):
        raise ValueError(
            f"task.examples: {task.examples} returned a {type(found).__name__}; return "
            "grpo_ray.tasks.examples.ExampleSets(train, validation), each a list of Example"
        )
    if not found.train or not found.validation:
        raise ValueError(f"task.examples: {task.examples} returned no examples to train on or to validate with")
    validation = found.validation[: task.num_validation_prompts]
    for name, examples in (("train", found.train), ("validation", validation)):
        for number, example in enumerate(examples):
            _check(example, f"task.examples: {name}[{number}] of {task.examples}")
    return ExampleSets(found.train, validation, found.notices)


def _check(example: Example, place: str) -> None:
    if not isinstance(example, Example):
        raise ValueError(f"{place} is a {type(example).__name__}; make it an Example(question, ground_truth)")
    for field in ("question", "ground_truth"):
        value = getattr(example, field)
        if not isinstance(value, str):
            raise ValueError(f"{place}: its {field} is {repr(value)[:80]}; it must be text, such as str(...)")
        if value != encodable(value):
            raise ValueError(f"{place}: its {field} holds half of a surrogate pair; write the whole character")


def episode_warmup(task: EpisodesTaskConfig, seed: int, num_pairs: int) -> Pairs:
    """Return the warm-up's (transcript, reply) pairs.

    Raises:
        ValueError: the task names no function of them.
    """
    if task.warmup is None:
        raise ValueError("task.warmup: a tiny model needs pairs to be warmed up with; name a `module:function`")
    pairs: Pairs = import_function(task.warmup, "task.warmup")(seed, num_pairs)
    return pairs


def _from_files(task: EpisodesTaskConfig, validation_path: str) -> ExampleSets:
    fields = Fields(task.question_field, task.answer_field, keeps_row=True)
    train_from, validation_from = (Source(path, (Path(path),)) for path in (task.examples, validation_path))
    train, notices = read_examples(train_from, fields)
    validation, more = read_examples(validation_from, fields, limit=task.num_validation_prompts)
    if place := next((e.place for e in (*train, *validation) if isinstance(e.question, Conversation)), None):
        raise ValueError(
            f"{place}: the question is a list of messages, but an episode begins with a text; set "
            "task.question_field to a field of text (messages may stay in another column)"
        )
    return ExampleSets(train, validation, (*notices, *more))
