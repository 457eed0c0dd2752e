"""An answer, however it was read out of its response, against the ground truth."""

from grpo_ray.rewards.base import NotGraded, verdict
from grpo_ray.rewards.math.equality import is_equal, number_in_prose

MAX_ANSWER_CHARACTERS = 1000  # parsing a longer one that is not the truth itself takes long


def grade(answer: str | None, ground_truth: str, fast: bool = True) -> dict[str, float]:
    """Right if equal to the truth as `is_equal` says; None is a response not in the format.

    The whole answer must be the expression: `71 or 72` is not 72. With `fast=False` a second try
    also accepts words around a single number (`She has 72 eggs`), for evaluating models that add them.

    Raises:
        NotGraded: the answer is too long, too deep or too large a number to look at; or so is the truth.
    """
    return verdict(
        has_format=answer is not None, is_right=answer is not None and is_right(answer, ground_truth, fast)
    )


def is_right(answer: str, ground_truth: str, fast: bool = True) -> bool:
    truth = ground_truth.strip()
    if max(len(answer), len(truth)) > MAX_ANSWER_CHARACTERS:
        if answer == truth:
            return True
        raise NotGraded(f"longer than {MAX_ANSWER_CHARACTERS} characters, and not the truth itself")
    if is_equal(answer, truth):
        return True
    number = None if fast else number_in_prose(answer)
    return number is not None and is_equal(number, truth)
