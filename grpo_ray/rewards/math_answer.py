"""An answer, however it was read out of its response, against the ground truth."""

from grpo_ray.rewards.base import verdict
from grpo_ray.rewards.math_equality import is_equal, number_in_prose

MAX_ANSWER_CHARACTERS = 1000  # longer answers are rambling, and parsing them takes long


def grade(answer: str | None, ground_truth: str, fast: bool = True) -> dict[str, float]:
    """Right if equal to the truth as text, number or LaTeX; None is a response not in the format.

    The whole answer must be the expression: `71 or 72` is not 72. With `fast=False` a second try
    also accepts words around a single number (`72 dollars`), for evaluating models that add them.
    """
    truth = ground_truth.strip()
    if answer is None:
        return verdict(has_format=False, is_right=False)
    if len(answer) > MAX_ANSWER_CHARACTERS:
        return verdict(has_format=True, is_right=False)
    is_right = is_equal(answer, truth)
    if not is_right and not fast:
        number = number_in_prose(answer)
        is_right = number is not None and is_equal(number, truth)
    return verdict(has_format=True, is_right=is_right)
