"""Rewards that judge no answer: terms to shape a sum with."""

from typing import Annotated, Literal

from annotated_types import Ge, Gt

from grpo_ray.rewards.answer_formats import AnswerIn, read_answer_in
from grpo_ray.rewards.base import scores


def format_reward_fn(response: str, ground_truth: str, answer_in: AnswerIn = "tags") -> dict[str, float]:
    """1 for an answer in the format, right or wrong; 0 for an empty one, or none."""
    has_format = bool(read_answer_in(answer_in, response))
    return scores(float(has_format), has_format, is_right=False)


def brevity_reward_fn(
    response: str,
    ground_truth: str,
    free: Annotated[int, Ge(0)] = 200,
    span: Annotated[int, Gt(0)] = 800,
    unit: Literal["characters", "words"] = "characters",
) -> dict[str, float]:
    """clip(1 - (length - free) / span, 0, 1): 1 up to `free`, then falling to 0 at `free + span`.

    Args:
        free: length in `unit` that costs nothing.
        span: further length over which the reward falls to 0.
        unit: words are what white space separates.
    """
    length = len(response) if unit == "characters" else len(response.split())
    return scores(min(1.0, max(0.0, 1 - (length - free) / span)), has_format=True, is_right=False)
