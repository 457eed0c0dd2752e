"""The types of rewards."""

from collections.abc import Callable

Scores = dict[str, float]
"""`format_reward` and `answer_reward` are 0.0 or 1.0; `reward`, which is trained on, is any finite number."""

RewardFn = Callable[[str, str], Scores]
"""(response, ground truth) to scores."""


class NotGraded(Exception):
    """The answer or the ground truth is too long, too deep or unreadable: an error, not a reward of 0."""


def verdict(has_format: bool, is_right: bool) -> Scores:
    """Return scores in which a right answer counts only in the right format."""
    return scores(has_format and is_right, has_format, has_format and is_right)


def scores(reward: float, has_format: bool, is_right: bool) -> Scores:
    """Return scores with a reward other than 0 or 1."""
    return {"reward": float(reward), "format_reward": float(has_format), "answer_reward": float(is_right)}
