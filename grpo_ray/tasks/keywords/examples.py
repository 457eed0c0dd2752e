"""The keywords task: `Write a sentence with the words: tree, boat, bird` wants a sentence that has them."""

import random
from collections.abc import Sequence

from grpo_ray.config.task import KeywordsTaskConfig
from grpo_ray.tasks.examples import Example, ExampleSets
from grpo_ray.tasks.keywords.pairs import not_evaluated, pair_examples, read_pairs
from grpo_ray.tasks.keywords.sentences import sentence
from grpo_ray.tasks.keywords.word_list import Keywords, draw_keywords, read_words


def keyword_examples(config: KeywordsTaskConfig, seed: int) -> ExampleSets:
    """Train and validation examples; no two of them want the same words, in whatever order.

    Raises:
        ValueError: names the file, and the line where one is wrong, and the fix.
    """
    if config.train_path is not None and config.validation_path is not None:
        return pair_examples(config.train_path, config.validation_path, config.num_validation_prompts)
    examples = [make_example(keywords) for keywords in task_keywords(config, seed)]
    return ExampleSets(examples[: config.num_train_prompts], examples[config.num_train_prompts :])


def make_example(keywords: Keywords) -> Example:
    """The prompt for these words, which are its ground truth too, comma-separated."""
    listed = ", ".join(keywords)
    return Example(f"Write a sentence with the words: {listed}", listed)


def task_keywords(config: KeywordsTaskConfig, seed: int) -> list[Keywords]:
    """Of each generated prompt, train's and then validation's.

    Raises:
        ValueError: the list cannot be read, or has too few words.
    """
    count = config.num_train_prompts + config.num_validation_prompts
    return draw_keywords(random.Random(f"keywords/{seed}"), config.keywords_path, config.num_keywords, count)


# ---- warm-up ----

HABITS = {"all": 0.35, "one left out": 0.35, "one replaced": 0.3}


def warmup_pairs(config: KeywordsTaskConfig, seed: int, num_pairs: int) -> list[tuple[str, str]]:
    """(question, response) pairs: a dataset's own answers, as many as it has, or generated sentences.

    Of the generated ones a third have all of the words; the others lack one, or have another in its place.
    What the three have in common, the prompt's format and the grammar, is taught; which of them is right is
    left for GRPO. No prompt of the task wants the same words.
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
    """What a warm-up response is made of, by one of the habits."""
    habit = rng.choices(list(HABITS), weights=list(HABITS.values()))[0]
    nouns, place = list(keywords), rng.randrange(len(keywords))
    if habit == "one left out" and len(nouns) > 1:
        del nouns[place]
    elif habit != "all":
        nouns[place] = rng.choice(words)
    return nouns
