r"""Where a response gives its answer: in `<answer>` tags after a thought, or in the last `\boxed{}`."""

from collections.abc import Mapping
from typing import Literal

from grpo_ray.config.reward import Reward, terms_of
from grpo_ray.rewards.math.text import brace_pairs

AnswerIn = Literal["tags", "boxed"]

THINK = "<think>"
OPENING_TAG, CLOSING_TAG = "</think> <answer>", "</answer>"
OPENING_BOX = r"\boxed{"

ENDINGS: dict[AnswerIn, str] = {  # of a response written for a warm-up; with tags, the prompt ends in `<think>`
    "tags": f" {OPENING_TAG} {{answer}} {CLOSING_TAG}",
    "boxed": r" \boxed{{{answer}}}",
}

IN_A_PLACE = ("exact_match", "graded", "question_only", "r1_zero", "sort_distance", "sort_inclusion_ordering")


def written(reward: Reward, answer: str) -> str:
    """Return a response with this answer as the reward's first term reads it; for own functions, the answer."""
    first = terms_of(reward)[0].reward
    return ENDINGS[answer_place(reward)].format(answer=answer) if first in IN_A_PLACE else answer


def answer_place(reward: Reward) -> AnswerIn:
    """Return where a reward, or any term of a sum, reads the answer; `tags` if none says otherwise."""
    is_boxed = any(
        term.reward == "question_only" or term.arguments.get("answer_in") == "boxed"
        for term in terms_of(reward)
    )
    return "boxed" if is_boxed else "tags"


def read_answer_in(answer_in: AnswerIn, response: str) -> str | None:
    """Return the answer's text, stripped; None when the response is not in that format."""
    return read_boxed(response) if answer_in == "boxed" else read_answer(response)


def read_answer(response: str) -> str | None:
    """Return the stripped text between the answer tags; None when the response is not in the format.

    The prompt already ends in `<think>`, or else the response begins with it. Each tag must occur exactly
    once: a second answer would be a hedge, and a second `</think>` leaves open which part was the thought.
    """
    response = response.strip().removeprefix(THINK)
    if THINK in response:
        return None
    if any(response.count(tag) != 1 for tag in ("</think>", "<answer>", CLOSING_TAG)):
        return None
    _, opening, rest = response.partition(OPENING_TAG)
    answer, closing, _ = rest.partition(CLOSING_TAG)
    return answer.strip() if opening and closing else None


def read_boxed(response: str) -> str | None:
    r"""Return the stripped text in the last `\boxed{...}`; None if it is missing, empty or not closed."""
    boxes = read_boxes(response)
    return boxes[-1] or None if boxes else None


def read_boxes(response: str) -> list[str]:
    r"""Return what the outermost boxes hold; the last is "" if not closed. `\boxed{\boxed{72}}` is one box.

    It takes linear time, however deeply boxes are nested.
    """
    contents: list[str] = []
    closing = brace_pairs(response)
    start = response.find(OPENING_BOX)
    while start >= 0:
        start += len(OPENING_BOX)
        end = closing.get(start - 1)
        if end is None:
            return [*contents, ""]
        contents.append(_without_boxes(response, start, end, closing))
        start = response.find(OPENING_BOX, end)
    return contents


def _without_boxes(text: str, start: int, end: int, closing: Mapping[int, int]) -> str:
    """Return the stripped content of [start, end), without boxes around the whole of it."""
    while True:
        while start < end and text[start].isspace():
            start += 1
        while start < end and text[end - 1].isspace():
            end -= 1
        inner = start + len(OPENING_BOX)
        if not (text.startswith(OPENING_BOX, start, end) and closing.get(inner - 1) == end - 1):
            return text[start:end]
        start, end = inner, end - 1
