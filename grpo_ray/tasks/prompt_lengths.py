"""The lengths of prompts in tokens, and the treatment of those that are too long."""

from collections.abc import Sequence
from itertools import islice

from grpo_ray.errors import counted
from grpo_ray.tasks.examples import Example
from grpo_ray.tasks.prompts import PLACEHOLDER, Prompter, tokenized

Lengths = tuple[list[int], list[int]]  # tokens of each prompt: train's, validation's


def count_tokens(examples: Sequence[Example], prompter: Prompter) -> list[int]:
    """Count the tokens of every prompt, template included.

    Raises:
        ValueError: the tokenizer turns a prompt into no tokens.
    """
    assert prompter.tokenizer is not None
    texts, counts = map(prompter.text, examples), list[int]()
    while some := list(islice(texts, 1024)):  # which are tokenized in parallel
        counts += map(len, tokenized(prompter.template, prompter.tokenizer, some))
    if 0 in counts:
        # For a folder without tokenizer.json, transformers silently makes an empty tokenizer.
        where = examples[counts.index(0)].place or f"the question {examples[counts.index(0)].question!r}"
        raise ValueError(
            f"model.path: its tokenizer turns the prompt of {where} into no tokens; "
            "check that tokenizer.json exists and belongs to the model"
        )
    return counts


def without_long(path: str, examples: Sequence[Example], counts: Sequence[int], limit: int) -> list[Example]:
    """Return the examples with prompts of at most `limit` tokens, of which there are `counts`.

    Raises:
        ValueError: none is left; it names the examples by their path.
    """
    kept = [example for example, count in zip(examples, counts, strict=True) if count <= limit]
    if examples and not kept:
        raise ValueError(
            f"{path}: every prompt is longer than {max(0, limit)} tokens (the shortest has {min(counts)}), "
            "so task.long_prompts = skip leaves none; raise task.max_prompt_tokens or "
            "generator.max_model_len, lower sampling.max_tokens, or shorten the template"
        )
    return kept


def long_notices(lengths: Lengths, limit: int, paths: tuple[str, str], fate: str) -> tuple[str, ...]:
    """Return a notice for each of train and validation with prompts longer than `limit` tokens: their fate."""
    numbers = [sum(count > limit for count in counts) for counts in lengths]
    return tuple(
        f"{path}: {counted(number, 'prompt')} longer than {limit} tokens {fate}"
        for path, number in zip(paths, numbers, strict=True)
        if number
    )


def check_cut(prompter: Prompter, limit: int) -> None:
    """Refuse a limit at which only the template's end is left of a prompt.

    Raises:
        ValueError: `limit` tokens keep nothing of the question.
    """
    template, tokenizer = prompter.template, prompter.tokenizer
    assert tokenizer is not None, "it has counted the prompts"
    tail = template.render(PLACEHOLDER, tokenizer).rpartition(PLACEHOLDER)[2]
    num_tail = len(tokenized(template, tokenizer, [tail])[0])
    if limit <= num_tail:
        raise ValueError(
            f"task.long_prompts: a prompt cut to {max(0, limit)} tokens keeps nothing of its question: "
            f"{num_tail} tokens of the template follow it. Raise task.max_prompt_tokens or "
            "generator.max_model_len, lower sampling.max_tokens, or set task.long_prompts to skip"
        )
