"""The arithmetic task: `What is 12 + 7 * 3?` is answered by `33`."""

import operator
import random
from collections.abc import Callable, Iterable, Sequence

from grpo_ray.config.task import ArithmeticTaskConfig
from grpo_ray.rewards.answer_formats import answer_place
from grpo_ray.tasks.examples import Example
from grpo_ray.tasks.sorting import ENDINGS

SHARE_RIGHT = 0.35
OFFSETS = (-10, -2, -1, 1, 2, 10)
SUMS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub}

Problem = tuple[str, ...]  # 12, +, 7, *, 3


def arithmetic_examples(config: ArithmeticTaskConfig, seed: int) -> tuple[list[Example], list[Example]]:
    """Train and validation examples: all questions distinct, so the two are disjoint.

    Raises:
        ValueError: there are not so many questions.
    """
    problems = _task_problems(config, seed)
    examples = [Example(_question(problem), str(value(problem))) for problem in problems]
    return examples[: config.num_train_prompts], examples[config.num_train_prompts :]


def warmup_pairs(config: ArithmeticTaskConfig, seed: int, num_pairs: int) -> list[tuple[str, str]]:
    """(question, response) pairs that teach the format, and two habits: to calculate, and to be a little off.

    Only validation's questions are spared: small numbers do not make enough to spare those for training too.
    There are fewer pairs where there are not so many questions.
    """
    spared = set(_task_problems(config, seed)[config.num_train_prompts :])
    rng = random.Random(f"arithmetic-warmup/{seed}")
    count = min(num_pairs, num_problems(config) - len(spared))
    problems = _distinct_problems(rng, config, count, spared)
    ending = ENDINGS[answer_place(config.reward)]
    return [(_question(problem), _response(rng, value(problem), ending)) for problem in problems]


def _response(rng: random.Random, result: int, ending: str) -> str:
    """The habit's name as its thought, then its answer in the form that the task's reward reads."""
    if rng.random() < SHARE_RIGHT:
        return f" calculate{ending.format(answer=result)}"
    return f" guess{ending.format(answer=result + rng.choice(OFFSETS))}"


def num_problems(config: ArithmeticTaskConfig) -> int:
    """How many questions there are; below 2**63, as the fields' bounds have it."""
    terms = 10 ** (config.num_digits * config.num_terms)
    return int(terms * len(set(config.operations)) ** (config.num_terms - 1))


def value(problem: Sequence[str]) -> int:
    """What it comes to, products first."""
    totals = [int(problem[0])]
    signs = []
    for sign, term in zip(problem[1::2], problem[2::2], strict=True):
        if sign == "*":
            totals[-1] *= int(term)
        else:
            signs.append(sign)
            totals.append(int(term))
    result = totals[0]
    for sign, total in zip(signs, totals[1:], strict=True):
        result = SUMS[sign](result, total)
    return result


def _task_problems(config: ArithmeticTaskConfig, seed: int) -> list[Problem]:
    count, pool = config.num_train_prompts + config.num_validation_prompts, num_problems(config)
    if count > pool:
        raise ValueError(
            f"task: num_train_prompts + num_validation_prompts is {count}, but task.num_terms = "
            f"{config.num_terms} numbers of task.num_digits = {config.num_digits} give only {pool} distinct "
            "prompts; use more terms, digits or operations, or fewer prompts"
        )
    return _distinct_problems(random.Random(f"arithmetic/{seed}"), config, count)


def _distinct_problems(
    rng: random.Random, config: ArithmeticTaskConfig, count: int, spared: Iterable[Problem] = ()
) -> list[Problem]:
    """`count` of them, none of which is spared."""
    spared = set(spared)
    drawn = rng.sample(range(num_problems(config)), count + len(spared))
    problems = (_problem(config, number) for number in drawn)
    return [problem for problem in problems if problem not in spared][:count]


def _problem(config: ArithmeticTaskConfig, number: int) -> Problem:
    """The questions numbered through: the number's digits, in mixed radix, are the terms and the operations."""
    operations = sorted(set(config.operations))
    number, term = divmod(number, 10**config.num_digits)
    problem = [str(term)]
    for _ in range(config.num_terms - 1):
        number, choice = divmod(number, len(operations))
        number, term = divmod(number, 10**config.num_digits)
        problem += [operations[choice], str(term)]
    return tuple(problem)


def _question(problem: Problem) -> str:
    return f"What is {' '.join(problem)}?"
