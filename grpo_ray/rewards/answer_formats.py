"""The two places in which a response may give its answer."""

from typing import Literal

from grpo_ray.rewards.answer_tags import read_answer
from grpo_ray.rewards.question_only import read_boxed

AnswerIn = Literal["tags", "boxed"]


def read_answer_in(answer_in: AnswerIn, response: str) -> str | None:
    r"""The text in the answer tags, or in the last `\boxed{}`; None when the response is not in that format."""
    return read_boxed(response) if answer_in == "boxed" else read_answer(response)
