"""Tasks with examples from files, local or in a dataset on the hub, or of episodes also from a function."""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from grpo_ray.config.reward import is_own
from grpo_ray.config.task import EpisodesTaskConfig, ExamplesTaskConfig
from grpo_ray.config.user_code import import_function
from grpo_ray.errors import counted
from grpo_ray.records.visible_text import encodable
from grpo_ray.rewards.answer_formats import written
from grpo_ray.tasks.examples import Conversation, Example, ExampleSets, Pairs
from grpo_ray.tasks.files import Fields, num_rows, read_examples
from grpo_ray.tasks.sources import Source, source_of

GSM8K_MARKER = "####"


def dataset_examples(task: ExamplesTaskConfig, seed: int) -> ExampleSets:
    """Read the train and validation examples; the seed changes nothing.

    Raises:
        ValueError: names the file, the wrong line if there is one, and how to fix it.
    """
    fields = _fields(task)
    train_from, validation_from = source_of(task, "train"), source_of(task, "validation")
    train, train_notices = read_examples(train_from, fields)
    validation, notices = read_examples(validation_from, fields, limit=task.num_validation_prompts)
    sets = ExampleSets(train, validation)
    limit = task.num_validation_prompts
    if len(validation) == limit and (number := sum(map(num_rows, validation_from.files))) > limit:
        some = f"the first {limit:,} of its {number:,} rows are validated with (task.num_validation_prompts)"
        notices.append(f"{validation_from.name}: {some}")
    notices += _marked(train, fields)
    if task.duplicates == "drop":
        sets = drop_duplicates(train, validation, train_from.name, validation_from.name)
    return replace(sets, notices=(*train_notices, *notices, *sets.notices))


def dataset_validation(task: ExamplesTaskConfig, seed: int, limit: int) -> ExampleSets:
    """Read only the first `limit` validation examples; else as `dataset_examples`."""
    source = source_of(task, "validation")
    examples, notices = read_examples(source, _fields(task), limit=limit)
    if task.duplicates == "drop":
        _check_answers(examples)
        examples, dropped = _first_of_each(examples, source.name)
        notices += dropped
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


def drop_duplicates(
    train: Sequence[Example], validation: Sequence[Example], train_path: str, validation_path: str
) -> ExampleSets:
    """Keep the first example of every question, and keep the validation questions out of training.

    Two questions are the same if their texts are equal apart from white space around them.

    Raises:
        ValueError: a question has two different answers, or nothing is left to train on.
    """
    _check_answers([*train, *validation])
    once, dropped = _first_of_each(train, train_path)
    evaluated, dropped_of_validation = _first_of_each(validation, validation_path)
    kept = _without(once, evaluated)  # if they were trained on, the validation reward would measure memory
    if not kept:
        raise ValueError(
            f"{train_path}: every question is also in {validation_path}, so none is left to train on; "
            "give other training or validation questions, or set task.duplicates to keep"
        )
    kept_out = _notice(train_path, len(once) - len(kept), f"of {validation_path} kept out of training")
    return ExampleSets(kept, evaluated, (*dropped, *kept_out, *dropped_of_validation))


def _check_answers(examples: Sequence[Example]) -> None:
    first: dict[str, Example] = {}
    pairs = ((first.setdefault(_key(example), example), example) for example in examples)
    conflicts = [(earlier, other) for earlier, other in pairs if earlier.ground_truth != other.ground_truth]
    if not conflicts:
        return
    one, other = conflicts[0]
    more = f" (and {len(conflicts) - 1:,} more like it)" if len(conflicts) > 1 else ""
    raise ValueError(
        f"{other.place}: the question {one.question[:80]!r} has the answer {other.ground_truth[:80]!r}, but "
        f"{one.ground_truth[:80]!r} in {one.place}{more}; correct or remove one of them, "
        "or set task.duplicates to keep"
    )


def _first_of_each(examples: Sequence[Example], path: str) -> tuple[list[Example], list[str]]:
    """Keep the first example of every question in one file; the second value is a notice about the others."""
    first: dict[str, Example] = {}
    for example in examples:
        first.setdefault(_key(example), example)
    apart = sum(first[_key(example)].facts != example.facts for example in examples)
    fate = f"dropped, {apart:,} with other columns: `task.duplicates: keep` uses them" if apart else "dropped"
    return list(first.values()), _notice(path, len(examples) - len(first), fate)


def _without(train: Sequence[Example], evaluated: Iterable[Example]) -> list[Example]:
    keys = set(map(_key, evaluated))
    return [example for example in train if _key(example) not in keys]


def _notice(path: str, number: int, fate: str) -> list[str]:
    return [f"{path}: {counted(number, 'duplicate question')} {fate}"] if number else []


def _key(example: Example) -> str:
    return example.question.strip()


def keep_validation_out(parts: Mapping[str, ExampleSets]) -> dict[str, ExampleSets]:
    """Drop training questions of a mixture's parts that another part is evaluated on.

    Raises:
        ValueError: nothing is left of a part.
    """
    found = {}
    for name, part in parts.items():
        others = (sets.validation for other, sets in parts.items() if other != name)
        kept = _without(part.train, chain.from_iterable(others))
        if part.train and not kept:
            raise ValueError(
                f"task.parts.{name}: every training question is one that another part is evaluated on; "
                "give the parts other questions"
            )
        notices = list(part.notices)
        if len(kept) < len(part.train):
            number = counted(len(part.train) - len(kept), "question")
            notices.append(f"{number} of other parts' validation left out")
        found[name] = ExampleSets(kept, part.validation, tuple(notices))
    return found


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
            check_example(example, f"task.examples: {name}[{number}] of {task.examples}")
    return ExampleSets(found.train, validation, found.notices)


def check_example(example: Example, place: str) -> None:
    """Refuse, by a ValueError that begins with `place`, what no prompt can be made of."""
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
        ValueError: the task names no function of them; or it returns none, or what is no pair of texts.
    """
    if task.warmup is None:
        raise ValueError("task.warmup: a tiny model needs pairs to be warmed up with; name a `module:function`")
    found = import_function(task.warmup, "task.warmup")(seed, num_pairs)
    pairs: Pairs = list(found) if isinstance(found, Iterable) else []
    if not pairs or not all(map(_is_pair, pairs)):
        one = repr(next((pair for pair in pairs if not _is_pair(pair)), found))[:80]
        raise ValueError(f"task.warmup: {task.warmup} returned {one}; return (transcript, reply) pairs of text")
    return pairs


def _is_pair(pair: object) -> bool:
    texts = pair if isinstance(pair, tuple | list) and len(pair) == 2 else [None]
    return all(isinstance(text, str) and text == encodable(text) for text in texts)


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
