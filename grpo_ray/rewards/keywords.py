"""The keyword reward: every given word occurs in the response."""

import re
from collections.abc import Sequence

from grpo_ray.rewards.base import verdict


def keyword_inclusion_reward_fn(response: str, keywords: str | Sequence[str]) -> dict[str, float]:
    """1 if every keyword occurs, in whatever case, as a word of its own: `cat` is not in `category`.

    Args:
        keywords: separated by commas, as a ground truth is; or a list.

    Raises:
        ValueError: there is no keyword.
    """
    words = keywords.split(",") if isinstance(keywords, str) else keywords
    patterns = [_as_word(word) for word in words if word.strip()]
    if not patterns:
        raise ValueError(f"{keywords!r} names no keyword; give them separated by commas")
    return verdict(has_format=True, is_right=all(pattern.search(response) for pattern in patterns))


def _as_word(keyword: str) -> re.Pattern[str]:
    """Line breaks within `New York` do not matter."""
    text = r"\s+".join(map(re.escape, keyword.split()))
    return re.compile(rf"(?<!\w){text}(?!\w)", re.IGNORECASE)
