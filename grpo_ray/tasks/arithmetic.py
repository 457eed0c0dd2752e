"""The arithmetic task: the answer to `What is 12 + 7 * 3?` is `33`."""

import random
from collections.abc import Collection, Sequence
from math import factorial, prod

from grpo_ray.config.task import ArithmeticTaskConfig
from grpo_ray.rewards.answer_formats import ENDINGS, answer_place
from grpo_ray.tasks.examples import Example, ExampleSets, Pairs

SHARE_RIGHT = 0.35
OFFSETS = (-10, -2, -1, 1, 2, 10)

Problem = tuple[str, ...]  # 12, +, 7, *, 3


def arithmetic_examples(config: ArithmeticTaskConfig, seed: int) -> ExampleSets:
    """Draw train and validation examples; all questions are distinct, so the two are disjoint.

    Raises:
        ValueError: there are fewer questions than prompts.
    """
    problems = _task_problems(config, seed)
    examples = [Example(_question(problem), str(value(problem))) for problem in problems]
    return ExampleSets(examples[: config.num_train_prompts], examples[config.num_train_prompts :])


def warmup_pairs(config: ArithmeticTaskConfig, seed: int, num_pairs: int) -> Pairs:
    """Draw (question, response) pairs that teach the format and two habits: calculating, and guessing nearby.

    Only the validation questions are excluded: small numbers do not give enough questions to exclude those for
    training too. The result is shorter than `num_pairs` if there are fewer questions.
    """
    excluded = set(_task_problems(config, seed)[config.num_train_prompts :])
    rng = random.Random(f"arithmetic-warmup/{seed}")
    count = min(num_pairs, num_problems(config) - len(excluded))
    problems = _distinct_problems(rng, config, count, excluded)
    ending = ENDINGS[answer_place(config.reward)]
    return [(_question(problem), _response(rng, value(problem), ending)) for problem in problems]


def _response(rng: random.Random, result: int, ending: str) -> str:
    """Write the habit's name as the thought, then its answer in the format that the task's reward reads."""
    if rng.random() < SHARE_RIGHT:
        return f" calculate{ending.format(answer=result)}"
    return f" guess{ending.format(answer=result + rng.choice(OFFSETS))}"


def num_problems(config: ArithmeticTaskConfig) -> int:
    """Count the possible questions; the bounds of the fields keep the number below 2**63."""
    terms = _terms(config)
    return int(prod(map(len, terms)) * len(set(config.operations)) ** (len(terms) - 1))


def _terms(config: ArithmeticTaskConfig) -> list[range]:
    """Return the numbers that each term is drawn from."""
    if config.ranges is not None:
        return [range(first, last + 1) for first, last in config.ranges]
    return [range(10**config.num_digits)] * config.num_terms


def value(problem: Sequence[str]) -> int:
    """Calculate the result, products first."""
    total, sign, product = 0, 1, int(problem[0])
    for operation, term in zip(problem[1::2], problem[2::2], strict=True):
        if operation == "*":
            product *= int(term)
        else:
            total += sign * product
            sign, product = 1 if operation == "+" else -1, int(term)
    return total + sign * product


def _task_problems(config: ArithmeticTaskConfig, seed: int) -> list[Problem]:
    count = config.num_train_prompts + config.num_validation_prompts
    problems = _distinct_problems(random.Random(f"arithmetic/{seed}"), config, count)
    if len(problems) < count:
        numbers = f"task.num_terms = {config.num_terms} numbers of task.num_digits = {config.num_digits}"
        raise ValueError(
            f"task: num_train_prompts + num_validation_prompts is {count}, but "
            f"{'task.ranges' if config.ranges else numbers} give only {len(problems)} distinct prompts; widen "
            "them or add operations, or use fewer prompts"
        )
    return problems


def _distinct_problems(
    rng: random.Random, config: ArithmeticTaskConfig, count: int, excluded: Collection[Problem] = ()
) -> list[Problem]:
    """Draw up to `count` distinct problems, none of them excluded."""
    orders = factorial(len(config.ranges)) if config.ranges else 1  # in which one question may be drawn
    wanted, pool = (count + len(excluded)) * orders, num_problems(config)
    drawn = (_problem(config, number) for number in rng.sample(range(pool), min(wanted, pool)))
    known = {_identity(config, problem) for problem in excluded}
    found: dict[Problem, Problem] = {}  # in the order drawn
    for problem in drawn:
        found.setdefault(_identity(config, problem), problem)
    return [problem for identity, problem in found.items() if identity not in known][:count]


def _identity(config: ArithmeticTaskConfig, problem: Problem) -> Problem:
    """Return one form for a sum or product in all orders of its terms; without `ranges`, the problem itself."""
    operations = set(problem[1::2])
    if config.ranges is None or operations not in ({"+"}, {"*"}):
        return problem
    return (*operations, *sorted(problem[::2]))


def _problem(config: ArithmeticTaskConfig, number: int) -> Problem:
    """Return a problem by its number: its mixed-radix digits are the terms and the operations."""
    operations = sorted(set(config.operations))
    problem: list[str] = []
    for terms in _terms(config):
        if problem:
            number, choice = divmod(number, len(operations))
            problem.append(operations[choice])
        number, term = divmod(number, len(terms))
        problem.append(str(terms[term]))
    return tuple(problem)


def _question(problem: Problem) -> str:
    return f"What is {' '.join(problem)}?"
