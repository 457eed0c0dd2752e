"""The sorting task: the answer to `Sort 51280` is `01258`."""

import random
from collections.abc import Callable

from grpo_ray.config.task import SortingTaskConfig
from grpo_ray.rewards.answer_formats import ENDINGS, answer_place
from grpo_ray.tasks.examples import Example, ExampleSets, Pairs


def sorting_examples(config: SortingTaskConfig, seed: int) -> ExampleSets:
    """Draw train and validation examples; all numbers are distinct, so the two are disjoint."""
    numbers = _task_numbers(config, seed)
    examples = [Example(_question(digits), _ascending(digits)) for digits in numbers]
    return ExampleSets(examples[: config.num_train_prompts], examples[config.num_train_prompts :])


def warmup_pairs(config: SortingTaskConfig, seed: int, num_pairs: int) -> Pairs:
    """Draw (question, response) pairs that teach the format and three habits, one of which is right.

    A policy that sorts a quarter of the time has something to reinforce: a random one would never earn a
    reward, and a perfect one would have nothing to learn. None of the numbers is a train or validation number,
    so the warm-up cannot memorise what GRPO is to learn.
    """
    taken = set(_task_numbers(config, seed))
    pool = _num_numbers(config)
    if num_pairs + len(taken) > pool:
        raise ValueError(
            f"model.tiny.warmup: {num_pairs} examples (num_steps * batch_size) and the task's {len(taken)} "
            f"prompts do not fit into the {pool} numbers of task.num_digits = {config.num_digits}; "
            "use more digits, fewer prompts or a shorter warm-up"
        )
    rng = random.Random(f"sorting-warmup/{seed}")
    # Drawing as many more as are taken leaves enough once the taken ones are dropped.
    drawn = _distinct_numbers(rng, config.num_digits, num_pairs + len(taken))
    fresh = [digits for digits in drawn if digits not in taken][:num_pairs]
    ending = ENDINGS[answer_place(config.reward)]
    return [(_question(digits), _response(rng, digits, ending)) for digits in fresh]


def num_fresh(config: SortingTaskConfig) -> int:
    """Count the numbers outside the train and validation sets.

    Raises:
        ValueError: there is none.
    """
    taken = config.num_train_prompts + config.num_validation_prompts
    fresh = _num_numbers(config) - taken
    if fresh < 1:
        raise ValueError(
            f"task.num_train_prompts, task.num_validation_prompts: {taken} prompts leave no number of "
            f"task.num_digits = {config.num_digits} for the tokenizer"
        )
    return fresh


def _num_numbers(config: SortingTaskConfig) -> int:
    return int(10**config.num_digits)


def _task_numbers(config: SortingTaskConfig, seed: int) -> list[str]:
    count, pool = config.num_train_prompts + config.num_validation_prompts, _num_numbers(config)
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


HABITS: dict[str, tuple[float, Callable[[str], str]]] = {
    "ascending": (0.25, _ascending),
    "descending": (0.45, lambda digits: _ascending(digits)[::-1]),
    "copying": (0.30, str),
}


def _response(rng: random.Random, digits: str, ending: str) -> str:
    """Write the habit's name as the thought, then its answer in the format that the task's reward reads."""
    names = list(HABITS)
    habit = rng.choices(names, weights=[HABITS[name][0] for name in names])[0]
    return f" {habit}{ending.format(answer=HABITS[habit][1](digits))}"
