r"""The reward for a prompt that is the question alone: what stands in the last `\boxed{...}`."""

import re

from grpo_ray.rewards.base import verdict
from grpo_ray.rewards.math_answer import grade, is_right
from grpo_ray.rewards.math_text import closing_brace

OPENING = r"\boxed{"
MAX_BOXES = 16  # with different contents; each is compared with the truth


def question_only_reward_fn(response: str, ground_truth: str, fast: bool = True) -> dict[str, float]:
    """Format 1 as `read_boxed` says; answer 1 as `grade` says, of every box: an answer is given once."""
    scores = grade(read_boxed(response), ground_truth, fast)
    if scores["answer_reward"]:
        others = dict.fromkeys(_earlier_boxes(response))
        if len(others) > MAX_BOXES or not all(is_right(other, ground_truth, fast) for other in others):
            return verdict(has_format=True, is_right=False)
    return scores


def read_boxed(response: str) -> str | None:
    r"""The stripped text in the last `\boxed{...}`; None when there is none, or it is empty or not closed."""
    start = response.rfind(OPENING)
    return None if start < 0 else _content(response, start) or None


def _earlier_boxes(response: str) -> list[str]:
    """What the boxes hold that end before the last one begins."""
    last = response.rfind(OPENING)
    starts = [match.start() for match in re.finditer(re.escape(OPENING), response[:last])]
    return [content for start in starts if (content := _content(response[:last], start))]


def _content(text: str, start: int) -> str | None:
    start += len(OPENING)
    end = closing_brace(text, start)
    return text[start:end].strip() if end is not None else None
