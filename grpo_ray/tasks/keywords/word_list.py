"""The list of words for keyword prompts, and sets of keywords drawn from it."""

import math
import random
import re
from collections.abc import Iterable
from pathlib import Path

BUILT_IN = Path(__file__).parent / "keywords.txt"  # nouns, which `sentence` requires
WORD = re.compile(r"[^\W_]+(['’-][^\W_]+)*")  # `o'clock`, `ice-cream`; a comma would separate two

Keywords = tuple[str, ...]  # in the order of the prompt


def read_words(path: str | Path | None) -> list[str]:
    """Read a list with one word per line, without duplicates in another case; None reads the built-in list.

    Raises:
        ValueError: the file cannot be read, or a line is not a word.
    """
    path = Path(path or BUILT_IN)
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start} is not UTF-8; save the list as UTF-8 text") from None
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read ({error.strerror}); give a text file with one keyword per line"
        ) from None
    words: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if word := line.strip():
            if WORD.fullmatch(word) is None:
                raise ValueError(f"{path}, line {number}: {word[:80]!r} is not a word; write one word per line")
            words.setdefault(word.casefold(), word)
    return list(words.values())


def draw_keywords(
    rng: random.Random, path: str | Path | None, num_keywords: tuple[int, int], count: int,
    taken: Iterable[Keywords] = (),
) -> list[Keywords]:  # fmt: skip
    """Draw the keywords of `count` prompts from the list at `path`: distinct as sets, and none of `taken`.

    All sizes from the first of `num_keywords` to the second are equally likely.

    Raises:
        ValueError: the list cannot be read, or has too few words.
    """
    words = read_words(path)
    seen = {frozenset(keywords) for keywords in taken}
    fewest, most = num_keywords
    num_sets = sum(math.comb(len(words), size) for size in range(fewest, most + 1))
    if len(words) < most or num_sets < len(seen) + count:
        raise ValueError(
            f"{path or BUILT_IN.name}: its {len(words):,} words make {num_sets:,} sets of {fewest} to {most}, "
            f"but {len(seen) + count:,} are needed, one per prompt. Give a longer list, more words per prompt, "
            "or fewer prompts"
        )
    drawn: list[Keywords] = []
    while len(drawn) < count:
        keywords = tuple(rng.sample(words, rng.randint(fewest, most)))
        if frozenset(keywords) not in seen:
            seen.add(frozenset(keywords))
            drawn.append(keywords)
    return drawn
