r"""The reward for a prompt that is the question alone: what stands in the last `\boxed{...}`."""

from grpo_ray.rewards.base import NotGraded, verdict
from grpo_ray.rewards.math.answer import grade, is_right
from grpo_ray.rewards.math.text import closing_brace

OPENING = r"\boxed{"
MAX_BOXES = 16  # with different contents; each is compared with the truth


def question_only_reward_fn(response: str, ground_truth: str, fast: bool = True) -> dict[str, float]:
    """Format 1 as `read_boxed` says; answer 1 as `grade` says, of every box: an answer is given once."""
    scores = grade(read_boxed(response), ground_truth, fast)
    if scores["answer_reward"]:
        others = list(dict.fromkeys(filter(None, _boxes(response)[:-1])))
        if not all(is_right(other, ground_truth, fast) for other in others[:MAX_BOXES]):
            return verdict(has_format=True, is_right=False)
        if len(others) > MAX_BOXES:
            raise NotGraded(f"more than {MAX_BOXES} boxes, each with another right answer")
    return scores


def read_boxed(response: str) -> str | None:
    r"""The stripped text in the last `\boxed{...}`; None when there is none, or it is empty or not closed."""
    boxes = _boxes(response)
    return boxes[-1] or None if boxes else None


def _boxes(response: str) -> list[str]:
    r"""What the outermost boxes hold; the last is "" where it is not closed. `\boxed{\boxed{72}}` is one."""
    contents: list[str] = []
    start = response.find(OPENING)
    while start >= 0:
        start += len(OPENING)
        end = closing_brace(response, start)
        if end is None:
            return [*contents, ""]
        content = response[start:end].strip()
        while content.startswith(OPENING) and closing_brace(content, len(OPENING)) == len(content) - 1:
            content = content[len(OPENING) : -1].strip()
        contents.append(content)
        start = response.find(OPENING, end)
    return contents
