"""The grade of an answer, wherever it stood in its response, against the ground truth."""

from grpo_ray.rewards.base import NotGraded, Scores, Ungradable, verdict
from grpo_ray.rewards.math.equality import is_equal, number_in_prose

MAX_ANSWER_CHARACTERS = 1000  # parsing a longer one would take long
NO_TRUTH = ""  # no answer equals it, which takes no time to find out


def grade(answer: str | None, ground_truth: str, fast: bool = True) -> Scores:
    """Grade an answer as right if `is_equal` finds it equal to the truth.

    The whole answer must be the expression: `71 or 72` is not 72.

    Args:
        answer: None for a response that is not in the format.
        fast: False also accepts words around a single number (`She has 72 eggs`), for evaluating models that
            add them.

    Raises:
        NotGraded: the truth is too long, too deeply nested, too large a number or unreadable.
        Ungradable: the truth is well, but the answer is one of these; it counts as wrong.
    """
    return verdict(
        has_format=answer is not None, is_right=answer is not None and is_right(answer, ground_truth, fast)
    )


def is_right(answer: str, ground_truth: str, fast: bool = True) -> bool:
    """Return True if the answer equals the truth; arguments and errors as for `grade`."""
    truth = ground_truth.strip()
    if truth == NO_TRUTH:
        return False
    if max(len(answer), len(truth)) > MAX_ANSWER_CHARACTERS:
        if answer == truth:
            return True
        blame = NotGraded if len(truth) > MAX_ANSWER_CHARACTERS else Ungradable
        raise blame(f"longer than {MAX_ANSWER_CHARACTERS} characters, and not the truth itself")
    if is_equal(answer, truth):
        return True
    number = None if fast else number_in_prose(answer)
    return number is not None and is_equal(number, truth)
