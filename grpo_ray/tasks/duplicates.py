"""Questions that occur more than once in a task's files."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from grpo_ray.tasks.examples import Example, ExampleSets, counted


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


def distinct(examples: Sequence[Example], path: str) -> tuple[list[Example], list[str]]:
    """Keep the first example of every question in one file; the second value is a notice about the others.

    Raises:
        ValueError: a question has two different answers.
    """
    _check_answers(examples)
    return _first_of_each(examples, path)


def _check_answers(examples: Sequence[Example]) -> None:
    first: dict[str, Example] = {}
    conflicts = []
    for example in examples:
        earlier = first.setdefault(_key(example), example)
        if earlier.ground_truth != example.ground_truth:
            conflicts.append((earlier, example))
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
    first: dict[str, Example] = {}
    for example in examples:
        first.setdefault(_key(example), example)
    return list(first.values()), _notice(path, len(examples) - len(first), "dropped")


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
    return {name: _without_others(name, part, parts) for name, part in parts.items()}


def _without_others(name: str, part: ExampleSets, parts: Mapping[str, ExampleSets]) -> ExampleSets:
    others = (sets.validation for other, sets in parts.items() if other != name)
    kept = _without(part.train, chain.from_iterable(others))
    if len(kept) == len(part.train):
        return part
    if not kept:
        raise ValueError(
            f"task.parts.{name}: every training question is one that another part is evaluated on; "
            "give the parts other questions"
        )
    number = counted(len(part.train) - len(kept), "question")
    return ExampleSets(kept, part.validation, (*part.notices, f"{number} of other parts' validation left out"))
