"""Words for keyword prompts, and pairs of prompt and answer (`python -m examples.course data keywords`)."""

import math
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from grpo_ray.errors import counted
from grpo_ray.tasks.examples import Example, ExampleSets
from grpo_ray.tasks.files import read_rows, text_of

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


FIELDS = ("prompt", "answer", "keywords")


@dataclass(frozen=True)
class KeywordPair:
    """One line of a file: `{"prompt": "...", "answer": "...", "keywords": ["tree", "boat"]}`."""

    prompt: str
    answer: str
    keywords: Keywords
    place: str = field(default="", compare=False)  # its file and line, for messages

    @property
    def example(self) -> Example:
        return Example(self.prompt, ", ".join(self.keywords), self.place)

    def to_json(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "answer": self.answer, "keywords": list(self.keywords)}


def read_pairs(path: str | Path, limit: int | None = None) -> list[KeywordPair]:
    """Read the first `limit` pairs of a JSONL or Parquet file; other fields are ignored.

    Raises:
        ValueError: the file cannot be read, holds no pairs, or holds one that is not valid.
    """
    pairs = [_pair(place, row) for place, row in islice(read_rows(Path(path), FIELDS), limit)]
    if not pairs:
        raise ValueError(f"{path}: holds no pairs; make some with `python -m examples.course data keywords`")
    return pairs


def _pair(place: str, row: Mapping[str, Any]) -> KeywordPair:
    if missing := [name for name in FIELDS if name not in row]:
        raise ValueError(
            f"{place}: no field {missing[0]!r}; a row has {', '.join(FIELDS)}, not {', '.join(row)}"
        )
    prompt, answer = text_of(place, row, "prompt"), text_of(place, row, "answer")
    keywords = row["keywords"]
    is_list = isinstance(keywords, list) and all(isinstance(word, str) for word in keywords)
    if not is_list or not keywords or not all(map(WORD.fullmatch, keywords)):
        raise ValueError(
            f"{place}: 'keywords' is {repr(keywords)[:80]}; it must be a list of at least one word"
        )
    return KeywordPair(prompt, answer, tuple(keywords), place)


def pair_examples(train_path: str, validation_path: str, num_validation: int) -> ExampleSets:
    """Read all train pairs and the first `num_validation` validation pairs; their keywords are not trained on.

    Raises:
        ValueError: as `read_pairs`, or nothing is left to train on.
    """
    train, validation = read_pairs(train_path), read_pairs(validation_path, num_validation)
    kept = not_evaluated(train, validation)
    if not kept:
        raise ValueError(
            f"{train_path}: {validation_path} asks for the keywords of every prompt too, so none is left to "
            "train on; give other training or validation prompts"
        )
    notices: tuple[str, ...] = ()
    if len(kept) < len(train):
        shared = counted(len(train) - len(kept), "prompt")
        notices = (f"{train_path}: {shared} with keywords of {validation_path} kept out of training",)
    return ExampleSets([pair.example for pair in kept], [pair.example for pair in validation], notices)


def not_evaluated(train: Sequence[KeywordPair], validation: Sequence[KeywordPair]) -> list[KeywordPair]:
    """Return the train pairs with keywords that no validation pair asks for."""
    evaluated = {_word_set(pair) for pair in validation}
    return [pair for pair in train if _word_set(pair) not in evaluated]


def _word_set(pair: KeywordPair) -> frozenset[str]:
    """Return a value that is equal for pairs that ask for the same words."""
    return frozenset(word.casefold() for word in pair.keywords)
