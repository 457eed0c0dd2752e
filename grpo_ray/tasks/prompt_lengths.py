"""How long prompts are in tokens, and what becomes of those that are too long."""

from collections.abc import Sequence

from grpo_ray.tasks.examples import Example, ExampleSets, counted
from grpo_ray.tasks.prompts import PLACEHOLDER, Prompter

Lengths = tuple[list[int], list[int]]  # tokens of each prompt: train's, validation's


def count_tokens(examples: Sequence[Example], prompter: Prompter) -> list[int]:
    """Tokens of every prompt, template included.

    Raises:
        ValueError: the tokenizer makes nothing of a prompt.
    """
    counts = [len(prompter.item(0, example).prompt_token_ids) for example in examples]
    if 0 in counts:
        # transformers makes an empty tokenizer of a folder that lacks tokenizer.json, and says nothing.
        where = examples[counts.index(0)].place or f"the question {examples[counts.index(0)].question!r}"
        raise ValueError(
            f"model.path: its tokenizer makes no token of the prompt of {where}; "
            "see that the model's tokenizer.json is there and is its own"
        )
    return counts


def skip_long(examples: ExampleSets, lengths: Lengths, limit: int, paths: tuple[str, str]) -> ExampleSets:
    """Without the examples whose prompts are longer than `limit` tokens; `paths` are train's, validation's.

    Raises:
        ValueError: none is left of a file.
    """
    kept_sets, notices = [], list(examples.notices)
    for path, some, counts in zip(paths, (examples.train, examples.validation), lengths, strict=True):
        kept = [example for example, count in zip(some, counts, strict=True) if count <= limit]
        if some and not kept:
            raise ValueError(
                f"{path}: every prompt is longer than {max(0, limit)} tokens (the shortest has {min(counts)}), "
                "so task.long_prompts = skip leaves none; raise task.max_prompt_tokens, "
                "lower sampling.max_tokens, or shorten the template"
            )
        if len(kept) < len(some):
            skipped = counted(len(some) - len(kept), "prompt")
            notices.append(f"{path}: {skipped} longer than {limit} tokens skipped")
        kept_sets.append(kept)
    train, validation = kept_sets
    return ExampleSets(train, validation, tuple(notices))


def cut_notices(lengths: Lengths, limit: int, paths: tuple[str, str]) -> tuple[str, ...]:
    """A line for each file of which prompts will be cut to `limit` tokens."""
    numbers = [sum(count > limit for count in counts) for counts in lengths]
    return tuple(
        f"{path}: {counted(number, 'prompt')} longer than {limit} tokens cut on the left"
        for path, number in zip(paths, numbers, strict=True)
        if number
    )


def check_cut(prompter: Prompter, limit: int) -> None:
    """Refuse to cut prompts to so few tokens that only the template's end is left.

    Raises:
        ValueError: `limit` tokens hold nothing of the question.
    """
    tail = prompter.template.render(PLACEHOLDER, prompter.tokenizer).rpartition(PLACEHOLDER)[2]
    num_tail = len(prompter.tokenizer(tail, add_special_tokens=False)["input_ids"])
    if limit <= num_tail:
        raise ValueError(
            f"task.long_prompts: a prompt cut to {max(0, limit)} tokens keeps nothing of its question, because "
            f"{num_tail} tokens of the template follow it; raise task.max_prompt_tokens, lower "
            "sampling.max_tokens, or set task.long_prompts to skip"
        )
