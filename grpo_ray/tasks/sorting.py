"""The sorting task: `Sort 51280` is answered by `01258`."""

import random
from collections.abc import Callable

from grpo_ray.config.task import SortingTaskConfig
from grpo_ray.rewards.answer_formats import AnswerIn, answer_place
from grpo_ray.tasks.examples import Example


def sorting_examples(config: SortingTaskConfig, seed: int) -> tuple[list[Example], list[Example]]:
    """Train and validation examples: all numbers distinct, so the two are disjoint."""
    numbers = _task_numbers(config, seed)
    examples = [Example(_question(digits), _ascending(digits)) for digits in numbers]
    return examples[: config.num_train_prompts], examples[config.num_train_prompts :]


def warmup_pairs(config: SortingTaskConfig, seed: int, num_pairs: int) -> list[tuple[str, str]]:
    """(question, response) pairs that teach the format and three habits, of which one is right.

    A policy that sorts a quarter of the time has something to reinforce: from a random base no
    reward ever comes, and from a perfect one nothing is left to learn. The numbers are outside the
    task's train and validation numbers, so what GRPO gains there is not memorised here.
    """
    taken = set(_task_numbers(config, seed))
    pool = 10**config.num_digits
    if num_pairs + len(taken) > pool:
        raise ValueError(
            f"model.tiny.warmup: {num_pairs} examples (num_steps * batch_size) and the task's {len(taken)} "
            f"prompts do not fit into the {pool} numbers of task.num_digits = {config.num_digits}; "
            "use more digits, fewer prompts or a shorter warm-up"
        )
    rng = random.Random(f"sorting-warmup/{seed}")
    # Drawing as many more as are taken leaves enough after the taken ones are dropped.
    drawn = _distinct_numbers(rng, config.num_digits, num_pairs + len(taken))
    fresh = [digits for digits in drawn if digits not in taken][:num_pairs]
    ending = ENDINGS[answer_place(config.reward)]
    return [(_question(digits), _response(rng, digits, ending)) for digits in fresh]


def num_fresh(config: SortingTaskConfig) -> int:
    """Numbers that are neither train's nor validation's.

    Raises:
        ValueError: there is none.
    """
    taken = config.num_train_prompts + config.num_validation_prompts
    fresh = 10**config.num_digits - taken
    if fresh < 1:
        raise ValueError(
            f"task.num_train_prompts, task.num_validation_prompts: {taken} prompts leave no number of "
            f"task.num_digits = {config.num_digits} for the tokenizer"
        )
    return fresh


def _task_numbers(config: SortingTaskConfig, seed: int) -> list[str]:
    count, pool = config.num_train_prompts + config.num_validation_prompts, 10**config.num_digits
    if count > pool:
        raise ValueError(
            f"task: num_train_prompts + num_validation_prompts is {count}, but task.num_digits = "
            f"{config.num_digits} gives only {pool} distinct prompts; use more digits or fewer prompts"
        )
    return _distinct_numbers(random.Random(f"sorting/{seed}"), config.num_digits, count)


def _distinct_numbers(rng: random.Random, num_digits: int, count: int) -> list[str]:
    return [str(number).zfill(num_digits) for number in rng.sample(range(10**num_digits), count)]


def _question(digits: str) -> str:
    return f"Sort {digits}"


def _ascending(digits: str) -> str:
    return "".join(sorted(digits))


def _descending(digits: str) -> str:
    return "".join(sorted(digits, reverse=True))


HABITS: dict[str, tuple[float, Callable[[str], str]]] = {
    "ascending": (0.25, _ascending),
    "descending": (0.45, _descending),
    "copying": (0.30, str),
}


ENDINGS: dict[AnswerIn, str] = {  # how an answer is given; in tags, the prompt ends in `<think>`
    "tags": " </think> <answer> {answer} </answer>",
    "boxed": r" \boxed{{{answer}}}",
}


def _response(rng: random.Random, digits: str, ending: str) -> str:
    """The habit's name as its thought, then its answer in the form that the task's reward reads."""
    names = list(HABITS)
    habit = rng.choices(names, weights=[HABITS[name][0] for name in names])[0]
    return f" {habit}{ending.format(answer=HABITS[habit][1](digits))}"
