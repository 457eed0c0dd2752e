"""What a reward is."""

from collections.abc import Callable

# (response, ground truth) -> {"reward", "format_reward", "answer_reward"}: the last two are 0.0 or 1.0,
# `reward`, which is trained on, any finite number.
RewardFn = Callable[[str, str], dict[str, float]]


class NotGraded(Exception):
    """There is no verdict: the answer or the truth is too long, too deep, or unreadable. An error, and no 0."""


def verdict(has_format: bool, is_right: bool) -> dict[str, float]:
    """A right answer counts only in the right format."""
    return scores(has_format and is_right, has_format, has_format and is_right)


def scores(reward: float, has_format: bool, is_right: bool) -> dict[str, float]:
    """A reward of its own size beside the two facts."""
    return {"reward": float(reward), "format_reward": float(has_format), "answer_reward": float(is_right)}
