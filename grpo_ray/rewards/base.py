"""The types of rewards."""

from collections.abc import Callable, Mapping
from typing import Any

Scores = dict[str, float]
"""`format_reward` and `answer_reward` are 0.0 or 1.0; `reward`, which is trained on, is within +-1e12.

Of a sum, each term's own reward is there too, unweighted, as `reward/NAME`; not if the term did not apply.
Empty: no term applied."""
FACTS = ("format_reward", "answer_reward")

About = Mapping[str, Any]
"""The facts that a function of the user's may ask for besides a response and its ground truth.

`prompt`, `question`, `row` (the columns other than question and answer), `fields` (these two), and of a chat
`messages`."""
NOTHING: About = {}

RewardFn = Callable[[str, str], Scores]
"""(response, ground truth) to scores."""


class NotGraded(Exception):
    """The ground truth is too long, too deep or unreadable: a fault of the data, so an error."""


class Ungradable(Exception):
    """The answer is too long, too deep or takes too much to judge: it earns what a wrong answer earns.

    Otherwise a policy would be better off with an answer that cannot be graded than with a wrong one.
    """

    def __init__(self, reason: str, scores: Scores | None = None) -> None:
        super().__init__(reason)
        self.scores = scores or verdict(has_format=False, is_right=False)


class Overrun(Ungradable):
    """The grading of the answer took too long or too much memory, or crashed its process.

    That is the answer's doing, unless it happens to every answer.
    """


class ScoringError(RuntimeError):
    """The answer could not be graded: the reward function raised, or something else ended its worker."""


Result = Scores | Ungradable | ScoringError
Graded = Scores | Exception
"""The scores of a response, or what its grading raised."""


def verdict(has_format: bool, is_right: bool) -> Scores:
    """Return scores in which a right answer counts only in the right format."""
    return scores(has_format and is_right, has_format, has_format and is_right)


def scores(reward: float, has_format: bool, is_right: bool) -> Scores:
    """Return scores with a reward other than 0 or 1."""
    return {"reward": float(reward), "format_reward": float(has_format), "answer_reward": float(is_right)}
