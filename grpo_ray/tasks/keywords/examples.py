"""The keywords task: `Write a sentence with the words: tree, boat, bird` requires all three of them."""

import random
from collections.abc import Sequence

from grpo_ray.config.task import KeywordsTaskConfig
from grpo_ray.tasks.examples import Example, ExampleSets, Pairs
from grpo_ray.tasks.keywords.pairs import (
    Keywords,
    draw_keywords,
    not_evaluated,
    pair_examples,
    read_pairs,
    read_words,
)


def keyword_examples(config: KeywordsTaskConfig, seed: int) -> ExampleSets:
    """Read or draw train and validation examples; no two ask for the same words, in any order.

    Raises:
        ValueError: names the file, the wrong line if there is one, and how to fix it.
    """
    if config.train_path is not None and config.validation_path is not None:
        return pair_examples(config.train_path, config.validation_path, config.num_validation_prompts)
    examples = [make_example(keywords) for keywords in task_keywords(config, seed)]
    return ExampleSets(examples[: config.num_train_prompts], examples[config.num_train_prompts :])


def keyword_validation(config: KeywordsTaskConfig, seed: int, limit: int) -> ExampleSets:
    """Read or draw only the first `limit` validation examples.

    Raises:
        ValueError: as `keyword_examples`.
    """
    if config.validation_path is not None:
        return ExampleSets([], [pair.example for pair in read_pairs(config.validation_path, limit)])
    return ExampleSets([], keyword_examples(config, seed).validation[:limit])


def make_example(keywords: Keywords) -> Example:
    """Make the prompt for these words, which, separated by commas, are also its ground truth."""
    listed = ", ".join(keywords)
    return Example(f"Write a sentence with the words: {listed}", listed)


def task_keywords(config: KeywordsTaskConfig, seed: int) -> list[Keywords]:
    """Draw the keywords of each generated prompt, first for training and then for validation.

    Raises:
        ValueError: the list cannot be read, or has too few words.
    """
    count = config.num_train_prompts + config.num_validation_prompts
    return draw_keywords(random.Random(f"keywords/{seed}"), config.keywords_path, config.num_keywords, count)


# ---- warm-up ----

HABITS = {"all": 0.35, "one left out": 0.35, "one replaced": 0.3}


def warmup_pairs(config: KeywordsTaskConfig, seed: int, num_pairs: int) -> Pairs:
    """Draw (question, response) pairs from a dataset's own answers, or generate them.

    A third of the generated responses have all of the words; the others lack one, or have another one instead.
    So the warm-up teaches the prompt's format and the grammar, and leaves it to GRPO to learn which response is
    right. No prompt of the task asks for the same words as a pair.
    """
    rng = random.Random(f"keywords-warmup/{seed}")
    if config.train_path is not None and config.validation_path is not None:
        validation = read_pairs(config.validation_path, config.num_validation_prompts)
        kept = not_evaluated(read_pairs(config.train_path), validation)
        pairs = [(pair.prompt, f" {pair.answer}") for pair in kept]
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

DETERMINERS = ("the", "the", "our", "that", "my")
VERBS = ("found", "followed", "watched", "hid", "moved", "touched", "liked", "passed")
PREPOSITIONS = ("near", "behind", "beside", "under", "with", "without")
QUALITIES = ("quiet", "new", "alone", "missing", "ready", "gone")


def sentence(rng: random.Random, nouns: Sequence[str]) -> str:
    """Write a sentence with the nouns in order: subject, object, then places; or `The tree was new.`

    All words are treated as nouns.
    """
    subject, *others = (f"{rng.choice(DETERMINERS)} {noun}" for noun in nouns)
    if not others:
        return _written(f"{subject} was {rng.choice(QUALITIES)}")
    clause = f"{subject} {rng.choice(VERBS)} {others[0]}"
    places = (f" {rng.choice(PREPOSITIONS)} {phrase}" for phrase in others[1:])
    return _written(clause + "".join(places))


def _written(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
