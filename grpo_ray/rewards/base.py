"""What a reward is."""

from collections.abc import Callable

# (response, ground truth) -> {"reward", "format_reward", "answer_reward"}, each 0.0 or 1.0.
RewardFn = Callable[[str, str], dict[str, float]]


def verdict(has_format: bool, is_right: bool) -> dict[str, float]:
    """A right answer counts only in the right format."""
    answer = float(has_format and is_right)
    return {"reward": answer, "format_reward": float(has_format), "answer_reward": answer}
