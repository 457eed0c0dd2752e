"""The keywords task: word list, prompts, grammar, warm-up, and training on files of pairs."""

import math
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from builders import write_rows
from pydantic import ValidationError

from grpo_ray.config.task import KeywordsTaskConfig
from grpo_ray.tasks import load_examples
from grpo_ray.tasks.examples import Example
from grpo_ray.tasks.keywords import draw_keywords, read_words, sentence, warmup_pairs


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


def write_list(folder: Path, text: str | bytes) -> str:
    path = folder / "words.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_the_bundled_list() -> None:
    words = read_words(None)
    assert len(words) >= 200
    assert all(re.fullmatch("[a-z]+", word) for word in words)
    assert len(set(words)) == len(words)


def test_the_users_own_list(tmp_path: Path) -> None:
    path = write_list(tmp_path, b"\xef\xbb\xbfTree\r\n\r\n  boat \ntree\nice-cream\no'clock\n\xc3\xa9t\xc3\xa9")
    assert read_words(path) == ["Tree", "boat", "ice-cream", "o'clock", "été"]


def test_wrong_and_missing_lists_are_refused(tmp_path: Path) -> None:
    for text, message in (
        (b"tree\nice cream\n", r"words.txt, line 2: 'ice cream' is not a word; write one word per line"),
        (b"tree, boat\n", r"line 1: 'tree, boat' is not a word"),
        (b"tr\xffee\n", r"words.txt: byte 2 is not UTF-8; save the list as UTF-8 text"),
    ):
        with pytest.raises(ValueError, match=message):
            read_words(write_list(tmp_path, text))
    with pytest.raises(ValueError, match=r"none.txt: cannot be read \(No such file or directory\)"):
        read_words(tmp_path / "none.txt")


def test_every_set_can_be_drawn_and_not_one_more(tmp_path: Path) -> None:
    path = write_list(tmp_path, "a\nb\nc\nd\ne\n")
    num_sets = math.comb(5, 2) + math.comb(5, 3)
    drawn = draw_keywords(random.Random(0), path, (2, 3), num_sets)
    assert len({frozenset(keywords) for keywords in drawn}) == num_sets == 20
    rest = draw_keywords(random.Random(1), path, (2, 3), 13, taken=drawn[:7])
    assert {frozenset(k) for k in rest} == {frozenset(k) for k in drawn[7:]}
    with pytest.raises(ValueError, match=r"words.txt: its 5 words make 20 sets of 2 to 3, but 21 are needed"):
        draw_keywords(random.Random(0), path, (2, 3), 14, taken=drawn[:7])
    with pytest.raises(ValueError, match=r"its 5 words make 1 sets of 5 to 6"):
        draw_keywords(random.Random(0), path, (5, 6), 1)


def test_every_number_of_words_is_equally_likely() -> None:
    drawn = draw_keywords(random.Random(0), None, (2, 4), 3000)
    assert all(len(set(keywords)) == len(keywords) for keywords in drawn)
    counts = Counter(map(len, drawn))
    assert [counts[size] / 3000 for size in (2, 3, 4)] == pytest.approx([1 / 3] * 3, abs=0.03)


def test_examples_are_seeded_and_disjoint_in_any_order(tmp_path: Path) -> None:
    path = write_list(tmp_path, "a\nb\nc\nd\ne\nf\n")
    sizes = {"num_train_prompts": 25, "num_validation_prompts": 10}
    config = KeywordsTaskConfig(keywords_path=path, num_keywords=(2, 3), **sizes)
    sets = load_examples(config, seed=0)
    assert (len(sets.train), len(sets.validation), sets.notices) == (25, 10, ())
    asked = [frozenset(example.ground_truth.split(", ")) for example in [*sets.train, *sets.validation]]
    assert len(set(asked)) == 35  # all sets that six words make
    assert all(e.question == f"Write a sentence with the words: {e.ground_truth}" for e in sets.train)
    assert load_examples(config, seed=0) == sets
    assert load_examples(config, seed=1) != sets


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_keywords": (3, 2)}, r"num_keywords is \[3, 2\]: give the minimum, then the maximum"),
        ({"train_path": "a.jsonl"}, "give both of train_path and validation_path, or neither"),
        ({"validation_path": "a.jsonl"}, "give both of train_path and validation_path, or neither"),
        ({"train_path": "a", "validation_path": "b", "keywords_path": "c"}, "keywords_path is for generated"),
    ],
)
def test_wrong_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        KeywordsTaskConfig(**fields)


@pytest.mark.parametrize("count", [1, 2, 6])
def test_sentences_have_their_nouns_in_order(count: int) -> None:
    rng = random.Random(count)
    nouns = [f"noun{'abcdef'[index]}" for index in range(count)]
    for _ in range(50):
        text = sentence(rng, nouns)
        assert [word for word in words_of(text) if word.startswith("noun")] == nouns
        assert text[0].isupper()
        assert text.endswith(".")
        assert text[1:-1] == text[1:-1].lower()


def test_warmup_has_three_habits_on_other_words() -> None:
    config = KeywordsTaskConfig(num_keywords=(2, 3), num_train_prompts=1500, num_validation_prompts=100)
    pairs = warmup_pairs(config, seed=3, num_pairs=4000)
    assert pairs == warmup_pairs(config, seed=3, num_pairs=4000)
    assert pairs != warmup_pairs(config, seed=4, num_pairs=4000)
    sets = load_examples(config, seed=3)
    task = {frozenset(example.ground_truth.split(", ")) for example in [*sets.train, *sets.validation]}
    listed = set(read_words(None))
    counts: Counter[tuple[int, int]] = Counter()
    for question, response in pairs:
        wanted = question.removeprefix("Write a sentence with the words: ").split(", ")
        assert frozenset(wanted) not in task
        assert response.startswith(" ")
        nouns = [word for word in words_of(response) if word in listed]
        missing = len(set(wanted) - set(nouns))
        assert missing <= 1
        counts[missing, len(wanted) - len(nouns)] += 1
    shares = {case: count / len(pairs) for case, count in counts.items()}
    assert shares[0, 0] == pytest.approx(0.35, abs=0.03)  # all of the words
    assert shares[1, 1] == pytest.approx(0.35, abs=0.03)  # one left out
    assert shares[1, 0] == pytest.approx(0.30, abs=0.03)  # another in one's place
    assert sum(shares.values()) == pytest.approx(1)


def test_warmup_of_single_words_is_not_always_right() -> None:
    config = KeywordsTaskConfig(num_keywords=(1, 1), num_train_prompts=20, num_validation_prompts=10)
    pairs = warmup_pairs(config, seed=0, num_pairs=200)
    right = sum(question.split()[-1] in words_of(response) for question, response in pairs)
    assert right / 200 == pytest.approx(0.35, abs=0.1)


# ---- files of pairs ----

BOAT = {"prompt": "Use boat and tree.", "answer": "The boat hid the tree.", "keywords": ["boat", "tree"]}
BIRD = {"prompt": "Use bird.", "answer": "A bird!", "keywords": ["bird"]}
FISH = {"prompt": "Use fish and sea.", "answer": "Fish like the sea.", "keywords": ["fish", "sea"]}


def config_of(train_path: str, validation_path: str, **fields: Any) -> KeywordsTaskConfig:
    return KeywordsTaskConfig(train_path=train_path, validation_path=validation_path, **fields)


def test_training_on_pairs(tmp_path: Path) -> None:
    train = write_rows(tmp_path / "a.jsonl", [BOAT, BIRD])
    config = config_of(train, write_rows(tmp_path / "b.jsonl", [FISH]))
    sets = load_examples(config, seed=0)
    assert sets.train == [Example("Use boat and tree.", "boat, tree"), Example("Use bird.", "bird")]
    assert sets.train[1].place == f"{train}, line 2"
    assert sets.validation == [Example("Use fish and sea.", "fish, sea")]
    assert sets.notices == ()
    pairs = [("Use bird.", " A bird!"), ("Use boat and tree.", " The boat hid the tree.")]
    assert sorted(warmup_pairs(config, seed=0, num_pairs=5)) == pairs
    assert warmup_pairs(config, seed=0, num_pairs=1)[0] in pairs


def test_keywords_of_validation_are_kept_out_of_training(tmp_path: Path) -> None:
    turned = {**BOAT, "prompt": "Tree and boat, please.", "keywords": ["Tree", "boat"]}
    train = write_rows(tmp_path / "a.jsonl", [turned, BIRD])
    validation = write_rows(tmp_path / "b.jsonl", [BOAT, BIRD])
    sets = load_examples(config_of(train, validation, num_validation_prompts=1), seed=0)
    assert [example.ground_truth for example in sets.train] == ["bird"]
    warmup = warmup_pairs(config_of(train, validation, num_validation_prompts=1), seed=0, num_pairs=5)
    assert warmup == [("Use bird.", " A bird!")]
    assert len(sets.validation) == 1
    assert sets.notices == (f"{train}: 1 prompt with keywords of {validation} kept out of training",)
    with pytest.raises(ValueError, match=r"so none is left to train on; give other"):
        load_examples(config_of(train, validation), seed=0)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x", "keywords": ["a"]}, "line 2: no field 'answer'; a row has prompt, answer, keywords"),
        ({**BIRD, "keywords": "bird"}, "line 2: 'keywords' is 'bird'; it must be a list of at least one word"),
        ({**BIRD, "keywords": []}, r"line 2: 'keywords' is \[\]"),
        ({**BIRD, "keywords": ["a, b"]}, "line 2: 'keywords' is"),
        ({**BIRD, "keywords": [1]}, r"line 2: 'keywords' is \[1\]"),
    ],
)
def test_wrong_pairs_are_named(tmp_path: Path, row: Any, message: str) -> None:
    train = write_rows(tmp_path / "a.jsonl", [BOAT, row])
    with pytest.raises(ValueError, match=f"a.jsonl, {message}"):
        load_examples(config_of(train, write_rows(tmp_path / "b.jsonl", [FISH])), seed=0)


def test_a_file_without_pairs_is_refused(tmp_path: Path) -> None:
    config = config_of(write_rows(tmp_path / "a.jsonl", []), write_rows(tmp_path / "b.jsonl", [FISH]))
    with pytest.raises(ValueError, match=r"a.jsonl: holds no pairs; make some with `python -m examples.course"):
        load_examples(config, seed=0)
