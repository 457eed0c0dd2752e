"""The keywords task: `Write a sentence with the words: tree, boat, bird` requires all three of them."""

import math
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from grpo_ray.config.task import KeywordsTaskConfig
from grpo_ray.errors import counted
from grpo_ray.tasks.examples import Example, ExampleSets, Pairs
from grpo_ray.tasks.files import read_rows, text_of

BUILT_IN = Path(__file__).parent / "keywords.txt"  # nouns, which `sentence` requires
WORD = re.compile(r"[^\W_]+(['’-][^\W_]+)*")  # `o'clock`, `ice-cream`; a comma would separate two

Keywords = tuple[str, ...]  # in the order of the prompt
FIELDS = ("prompt", "answer", "keywords")
HABITS = {"all": 0.35, "one left out": 0.35, "one replaced": 0.3}
DETERMINERS = ("the", "the", "our", "that", "my")
VERBS = ("found", "followed", "watched", "hid", "moved", "touched", "liked", "passed")
PREPOSITIONS = ("near", "behind", "beside", "under", "with", "without")
QUALITIES = ("quiet", "new", "alone", "missing", "ready", "gone")


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


def read_pairs(path: str | Path, limit: int | None = None) -> list[Example]:
    """Read the first `limit` pairs of a JSONL or Parquet file, each an example with its response.

    A row is `{"prompt": "...", "answer": "...", "keywords": ["tree", "boat"]}`; other fields are ignored.

    Raises:
        ValueError: the file cannot be read, holds no pairs, or holds one that is not valid.
    """
    pairs = [_pair(place, row) for place, row in islice(read_rows(Path(path), FIELDS), limit)]
    if not pairs:
        raise ValueError(f"{path}: holds no pairs; make some with `python -m examples.course data keywords`")
    return pairs


def _pair(place: str, row: Mapping[str, Any]) -> Example:
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
    return Example(prompt, ", ".join(keywords), place, response=answer)


def _pair_examples(train_path: str, validation_path: str, num_validation: int) -> ExampleSets:
    """Read all train pairs, and the first validation pairs, with keywords that are not trained on."""
    train, validation = read_pairs(train_path), read_pairs(validation_path, num_validation)
    evaluated = set(map(_word_set, validation))
    kept = [example for example in train if _word_set(example) not in evaluated]
    if not kept:
        raise ValueError(
            f"{train_path}: {validation_path} asks for the keywords of every prompt too, so none is left to "
            "train on; give other training or validation prompts"
        )
    notices: tuple[str, ...] = ()
    if len(kept) < len(train):
        shared = counted(len(train) - len(kept), "prompt")
        notices = (f"{train_path}: {shared} with keywords of {validation_path} kept out of training",)
    return ExampleSets(kept, validation, notices)


def _word_set(example: Example) -> frozenset[str]:
    """Return a value that is equal for examples that ask for the same words."""
    return frozenset(example.ground_truth.casefold().split(", "))


def keyword_examples(config: KeywordsTaskConfig, seed: int) -> ExampleSets:
    """Read or draw train and validation examples; no two ask for the same words, in any order.

    Raises:
        ValueError: names the file, the wrong line if there is one, and how to fix it.
    """
    if config.train_path is not None and config.validation_path is not None:
        return _pair_examples(config.train_path, config.validation_path, config.num_validation_prompts)
    examples = [make_example(keywords) for keywords in task_keywords(config, seed)]
    return ExampleSets(examples[: config.num_train_prompts], examples[config.num_train_prompts :])


def keyword_validation(config: KeywordsTaskConfig, seed: int, limit: int) -> ExampleSets:
    """Read or draw only the first `limit` validation examples; else as `keyword_examples`."""
    if config.validation_path is not None:
        return ExampleSets([], read_pairs(config.validation_path, limit))
    return ExampleSets([], keyword_examples(config, seed).validation[:limit])


def make_example(keywords: Keywords) -> Example:
    """Make the prompt for these words, which, separated by commas, are also its ground truth."""
    listed = ", ".join(keywords)
    return Example(f"Write a sentence with the words: {listed}", listed)


def task_keywords(config: KeywordsTaskConfig, seed: int) -> list[Keywords]:
    """Draw the keywords of each generated prompt, first for training and then for validation.

    Raises:
        ValueError: as `draw_keywords`.
    """
    count = config.num_train_prompts + config.num_validation_prompts
    return draw_keywords(random.Random(f"keywords/{seed}"), config.keywords_path, config.num_keywords, count)


def warmup_pairs(config: KeywordsTaskConfig, seed: int, num_pairs: int) -> Pairs:
    """Draw (question, response) pairs from a dataset's own answers, or generate them.

    A third of the generated responses have all of the words; the others lack one, or have another one instead.
    So the warm-up teaches the prompt's format and the grammar, and leaves it to GRPO to learn which response is
    right. No prompt of the task asks for the same words as a pair.
    """
    rng = random.Random(f"keywords-warmup/{seed}")
    if config.train_path is not None:
        pairs = [(each.question, f" {each.response}") for each in keyword_examples(config, seed).train]
        return rng.sample(pairs, min(num_pairs, len(pairs)))
    taken = task_keywords(config, seed)
    drawn = draw_keywords(rng, config.keywords_path, config.num_keywords, num_pairs, taken)
    words = read_words(config.keywords_path)
    return [
        (make_example(keywords).question, f" {sentence(rng, _nouns(rng, keywords, words))}")
        for keywords in drawn
    ]


def _nouns(rng: random.Random, keywords: Keywords, words: Sequence[str]) -> list[str]:
    """Choose one of the habits, and return the nouns of its response."""
    habit = rng.choices(list(HABITS), weights=list(HABITS.values()))[0]
    nouns, place = list(keywords), rng.randrange(len(keywords))
    if habit == "one left out" and len(nouns) > 1:
        del nouns[place]
    elif habit != "all":
        nouns[place] = rng.choice(words)
    return nouns


# ---- a grammar of simple sentences around given nouns: `The tree hid our boat near the bird.` ----


def sentence(rng: random.Random, nouns: Sequence[str]) -> str:
    """Write a sentence with the nouns in order: subject, object, then places; or `The tree was new.`

    All words are treated as nouns.
    """
    subject, *others = (f"{rng.choice(DETERMINERS)} {noun}" for noun in nouns)
    predicate = f"{rng.choice(VERBS)} {others[0]}" if others else f"was {rng.choice(QUALITIES)}"
    text = f"{subject} {predicate}"
    for phrase in others[1:]:
        text += f" {rng.choice(PREPOSITIONS)} {phrase}"
    return f"{text[0].upper()}{text[1:]}."
