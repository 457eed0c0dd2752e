"""The keyword reward: every given word occurs in the response."""

import re
import unicodedata
from collections.abc import Sequence

from grpo_ray.rewards.base import verdict


def keyword_inclusion_reward_fn(response: str, keywords: str | Sequence[str]) -> dict[str, float]:
    """1 if every keyword occurs, in whatever case, as a word of its own: `cat` is not in `category`.

    A hyphen ends a word: `ice` is in `ice-cream`. Both kinds of apostrophe, and of accents, are the same.

    Args:
        keywords: separated by commas, as a ground truth is; or a list.

    Raises:
        ValueError: there is no keyword.
    """
    words = keywords.split(",") if isinstance(keywords, str) else keywords
    patterns = [_as_word(_normal(word)) for word in words if word.strip()]
    if not patterns:
        raise ValueError(f"{keywords!r} names no keyword; give them separated by commas")
    text = _normal(response)
    return verdict(has_format=True, is_right=all(pattern.search(text) for pattern in patterns))


def _normal(text: str) -> str:
    return unicodedata.normalize("NFC", text).replace("’", "'")


def _as_word(keyword: str) -> re.Pattern[str]:
    """Line breaks within `New York` do not matter."""
    text = r"\s+".join(map(re.escape, keyword.split()))
    return re.compile(rf"(?<!\w){text}(?!\w)", re.IGNORECASE)
