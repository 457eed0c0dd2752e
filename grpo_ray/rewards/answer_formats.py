"""The two places in which a response may give its answer."""

from typing import Literal

from grpo_ray.config.reward import Reward
from grpo_ray.rewards.answer_tags import read_answer
from grpo_ray.rewards.question_only import read_boxed

AnswerIn = Literal["tags", "boxed"]


def read_answer_in(answer_in: AnswerIn, response: str) -> str | None:
    r"""The text in the answer tags, or in the last `\boxed{}`; None when the response is not in that format."""
    return read_boxed(response) if answer_in == "boxed" else read_answer(response)


def answer_place(reward: Reward) -> AnswerIn:
    """Where a reward, or any term of a sum, reads the answer; in the tags if they do not say."""
    if isinstance(reward, str):
        return "boxed" if reward == "question_only" else "tags"
    is_boxed = any(
        term.reward == "question_only" or term.arguments.get("answer_in") == "boxed" for term in reward
    )
    return "boxed" if is_boxed else "tags"
