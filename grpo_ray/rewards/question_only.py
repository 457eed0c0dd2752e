r"""The reward for a prompt that is the question alone: what stands in the last `\boxed{...}`."""

from grpo_ray.rewards.math_answer import grade

OPENING = r"\boxed{"


def question_only_reward_fn(response: str, ground_truth: str, fast: bool = True) -> dict[str, float]:
    """Format 1 as `read_boxed` says; answer 1 as `grade` says."""
    return grade(read_boxed(response), ground_truth, fast)


def read_boxed(response: str) -> str | None:
    r"""The stripped text in the last `\boxed{...}`; None when there is none, or it is empty or not closed."""
    start = response.rfind(OPENING)
    if start < 0:
        return None
    content = response[start + len(OPENING) :]
    end = _closing_brace(content)
    return content[:end].strip() or None if end is not None else None


def _closing_brace(text: str) -> int | None:
    r"""Where the brace closes that was opened just before `text`; `\{` and `\}` are signs, not braces."""
    depth, is_escaped = 1, False
    for index, character in enumerate(text):
        if not is_escaped and character in "{}":
            depth += 1 if character == "{" else -1
        if depth == 0:
            return index
        is_escaped = character == "\\" and not is_escaped
    return None
