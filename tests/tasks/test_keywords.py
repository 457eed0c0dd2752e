"""The keywords task: words, prompts, grammar, warm-up, files of pairs, and the course's `data keywords`."""

import asyncio
import json
import math
import os
import random
import re
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import TinyModel, make_completion, write_rows
from commands import Capture

from examples.course.__main__ import run
from examples.course.keyword_data import writers
from examples.course.keyword_data.keyword_dataset import KeywordDataset, KeywordPair
from grpo_ray.config import Config
from grpo_ray.config.task import KeywordsTaskConfig
from grpo_ray.engines.base import EngineDied
from grpo_ray.learning.model_files import load_tokenizer
from grpo_ray.run import preparation
from grpo_ray.tasks import load_examples
from grpo_ray.tasks.examples import Example
from grpo_ray.tasks.keywords import draw_keywords, read_words, sentence, warmup_pairs
from grpo_ray.types import Completion, SamplingSettings


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
        ({"prompt": "x", "keywords": ["a"]}, ", line 2: no field 'answer'; a row has prompt, answer, keywords"),
        ({**BIRD, "keywords": "bird"}, ", line 2: 'keywords' is 'bird'; it must be a list of at least one"),
        ({**BIRD, "keywords": []}, r", line 2: 'keywords' is \[\]"),
        ({**BIRD, "keywords": ["a, b"]}, ", line 2: 'keywords' is"),
        ({**BIRD, "keywords": [1]}, r", line 2: 'keywords' is \[1\]"),
        (None, ": holds no pairs; make some with `python -m examples.course"),
    ],
)
def test_wrong_pairs_are_named_and_none_are_refused(tmp_path: Path, row: Any, message: str) -> None:
    train = write_rows(tmp_path / "a.jsonl", [BOAT, row] if row else [])
    with pytest.raises(ValueError, match=f"a.jsonl{message}"):
        load_examples(config_of(train, write_rows(tmp_path / "b.jsonl", [FISH])), seed=0)


# ---- verified pairs from templates and from an engine, and their split ----


def make(output: Path, *options: str) -> int:
    return run(["data", "keywords", "--output", str(output), *options])


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def pairs_of(folder: Path) -> list[dict[str, Any]]:
    return read(folder / "train.jsonl") + read(folder / "validation.jsonl")


def wanted_of(row: dict[str, Any]) -> frozenset[str]:
    return frozenset(row["keywords"])


def test_pairs_are_verified_split_and_disjoint(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "data" / "set"
    assert make(folder, "--num-pairs", "203", "--num-keywords", "1-3") == 0
    train, validation = read(folder / "train.jsonl"), read(folder / "validation.jsonl")
    assert (len(train), len(validation)) == (162, 41)  # 0.8 * 203 = 162.4
    for row in train + validation:
        assert set(row) == {"prompt", "answer", "keywords"}
        assert row["prompt"] == f"Write a sentence with the words: {', '.join(row['keywords'])}"
        assert set(row["keywords"]) <= set(row["answer"].lower().strip(".").split())
    assert {len(row["keywords"]) for row in train} == {1, 2, 3}
    assert len({wanted_of(row) for row in train + validation}) == 203
    written = sorted(path.name for path in folder.parent.rglob("*"))
    assert written == ["definition.json", "set", "train.jsonl", "validation.jsonl"]
    assert f"{folder}: 162 pairs in train.jsonl, 41 in validation.jsonl" in capsys.readouterr().out


def test_the_seed_determines_the_dataset_and_its_files_are_a_task(tmp_path: Path) -> None:
    for name, seed in (("a", "5"), ("b", "5"), ("c", "6")):
        make(tmp_path / name, "--num-pairs", "10", "--seed", seed)
    a, b, c = ((tmp_path / name / "train.jsonl").read_bytes() for name in "abc")
    assert a == b != c
    paths = {f"{name}_path": str(tmp_path / "a" / f"{name}.jsonl") for name in ("train", "validation")}
    sets = load_examples(KeywordsTaskConfig(**paths), seed=0)
    rows = read(tmp_path / "a" / "train.jsonl")
    assert [example.question for example in sets.train] == [row["prompt"] for row in rows]
    assert [example.ground_truth.split(", ") for example in sets.train] == [row["keywords"] for row in rows]
    assert (len(sets.validation), sets.notices) == (2, ())


def refusal(capsys: Capture, output: Path, *options: str) -> str:
    before = set(output.parent.iterdir())
    assert make(output, *options) == 2
    assert set(output.parent.iterdir()) == before  # nothing was begun
    return capsys.readouterr().err


def test_nothing_is_overwritten(tmp_path: Path, capsys: Capture) -> None:
    make(tmp_path / "set", "--num-pairs", "5")
    before = (tmp_path / "set" / "train.jsonl").read_bytes()
    message = refusal(capsys, tmp_path / "set", "--num-pairs", "5", "--seed", "1")
    assert "set exists already, and is not overwritten; give another --output" in message
    assert (tmp_path / "set" / "train.jsonl").read_bytes() == before
    (tmp_path / "file").write_text("mine")
    assert "exists already" in refusal(capsys, tmp_path / "file", "--num-pairs", "5")
    assert make(tmp_path / "file" / "set") == 2
    assert "set.unfinished cannot be written (Not a directory); give another" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert make(tmp_path / "empty", "--num-pairs", "5") == 0


def test_wrong_options_are_refused(tmp_path: Path, capsys: Capture) -> None:
    output = tmp_path / "set"
    assert "--num-pairs: 4 is too few; a dataset needs 5" in refusal(capsys, output, "--num-pairs", "4")
    assert "none.txt: cannot be read" in refusal(capsys, output, "--keywords", "none.txt")
    (tmp_path / "list.txt").write_text("red\ngreen\nblue\n")
    message = refusal(capsys, output, "--keywords", str(tmp_path / "list.txt"), "--num-keywords", "2")
    assert "list.txt: its 3 words make 3 sets of 2 to 2, but 1,000 are needed" in message
    assert "model.path: no folder './none'" in refusal(capsys, output, "--model", "./none")
    for wrong in ("--num-pairs 0", "--seed -1", "--num-keywords 4-2", "--temperature 0", "--max-attempts x"):
        option, value = wrong.split()
        with pytest.raises(SystemExit):
            make(output, option, value)
        assert f"argument {option}: '{value}' is not a number" in capsys.readouterr().err


Script = Callable[[list[str], int], str | Completion]


class ScriptedEngine:
    """An engine that answers from a script and records the prompts."""

    def __init__(self, tokenizer: Any, script: Script) -> None:
        self._tokenizer, self._script = tokenizer, script
        self.prompts: Counter[str] = Counter()
        self.settings: set[SamplingSettings] = set()
        self.is_started = self.is_shut_down = False

    async def start(self, version: int) -> None:
        assert version == 0
        self.is_started = True

    async def generate(
        self, prompt_token_ids: tuple[int, ...], settings: SamplingSettings
    ) -> tuple[Completion, ...]:
        assert self.is_started  # vLLM has no version to stamp tokens with earlier
        prompt = self._tokenizer.decode(prompt_token_ids)
        self.prompts[prompt] += 1
        self.settings.add(settings)
        answer = self._script(prompt.rpartition("words: ")[2].split(", "), self.prompts[prompt])
        await asyncio.sleep(0)  # a real engine never answers immediately
        return (answer if isinstance(answer, Completion) else make_completion([1, 2], text=answer),)

    async def shutdown(self) -> None:
        self.is_shut_down = True


@pytest.fixture
def scripted(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> Callable[[Script], ScriptedEngine]:
    """Return a function that replaces the engine of `--model` by a scripted one; everything else is real."""
    monkeypatch.setattr(preparation, "VLLM_CPU_HEADS", (16,))  # the scripted one has no attention

    def install(script: Script) -> ScriptedEngine:
        engine = ScriptedEngine(load_tokenizer(str(tiny_model())), script)

        def make_engine(config: Config, model_path: str, max_model_len: int, seed: int) -> ScriptedEngine:
            assert (model_path, seed) == (str(tiny_model()), 0)
            assert max_model_len > config.sampling.max_tokens
            return engine

        monkeypatch.setattr(writers, "make_engine", make_engine)
        return engine

    return install


def test_answers_of_a_model_are_kept_retried_or_dropped(
    tmp_path: Path, tiny_model: TinyModel, scripted: Any, capsys: Capture
) -> None:
    def script(keywords: list[str], attempt: int) -> str | Completion:
        if "red" in keywords:
            return "No such colour."  # never right
        if "green" in keywords and attempt == 1:
            return make_completion([1], text=" and ".join(keywords), finish_reason="length")
        if "green" in keywords and attempt == 2:
            return f"Only {keywords[0]}s and {keywords[1]}."  # `greens` is another word
        return f"\n I like {keywords[0].upper()}, and {keywords[1]}! "

    (tmp_path / "list.txt").write_text("red\ngreen\nblue\nblack\nwhite\ngrey\n")
    engine = scripted(script)
    words = ("--keywords", str(tmp_path / "list.txt"), "--num-keywords", "2", "--num-pairs", "15")
    model = ("--model", str(tiny_model()), "--temperature", "0.7", "--max-attempts", "3")
    assert make(tmp_path / "set", *words, *model) == 0
    assert engine.is_shut_down
    end_ids = (load_tokenizer(str(tiny_model())).eos_token_id,)
    assert engine.settings == {SamplingSettings(1, 0.7, 1.0, 1, 64, end_token_ids=end_ids)}
    tries = {frozenset(p.rpartition("words: ")[2].split(", ")): n for p, n in engine.prompts.items()}
    assert len(tries) == 15
    for keywords, num_tries in tries.items():
        assert num_tries == (3 if keywords & {"red", "green"} else 1)
    rows = pairs_of(tmp_path / "set")
    assert {wanted_of(row) for row in rows} == {keywords for keywords in tries if "red" not in keywords}
    for row in rows:
        assert row["answer"] == f"I like {row['keywords'][0].upper()}, and {row['keywords'][1]}!"
    out = capsys.readouterr().out
    assert "8 pairs in train.jsonl, 2 in validation.jsonl" in out
    assert "5 prompts dropped: no answer had all of the keywords in 3 attempts" in out


def good(keywords: list[str], attempt: int) -> str:
    return f"Here: {' '.join(keywords)}."


@pytest.mark.slow
def test_an_interruption_and_a_dead_engine_lose_nothing(
    tmp_path: Path, tiny_model: TinyModel, scripted: Any, capsys: Capture
) -> None:
    def interrupting(keywords: list[str], attempt: int) -> str:
        if sum(engine.prompts.values()) == 7:
            if end is None:
                raise EngineDied("vLLM's engine died: killed")
            os.kill(os.getpid(), end)
        return good(keywords, attempt)

    options = ("--num-pairs", "600", "--model", str(tiny_model()))
    kept: list[Any] = []
    for end, status in ((signal.SIGTERM, 130), (signal.SIGINT, 130), (None, 2)):
        engine, before = scripted(interrupting), len(kept)
        assert make(tmp_path / "set", *options) == status
        assert engine.is_shut_down
        kept = read(tmp_path / "set.unfinished" / "pairs.jsonl")
        assert before + (6 if end is None else 7) <= len(kept) < 600
        message = f"{len(kept)} of 600 pairs are verified and kept in {tmp_path / 'set.unfinished'}"
        died = "vLLM's engine died: killed; " if end is None else ""
        assert f"{died}{message}" in capsys.readouterr().err
        assert not (tmp_path / "set").exists()

    for other in (("--seed", "9"), ("--temperature", "0.3")):
        assert make(tmp_path / "set", *options, *other) == 2
        message = "set.unfinished holds another keyword dataset; give another --output"
        assert message in capsys.readouterr().err
    engine = scripted(good)
    assert make(tmp_path / "set", *options) == 0
    assert f"resuming with {len(kept)} pairs of" in capsys.readouterr().out
    assert sum(engine.prompts.values()) == 600 - len(kept)
    assert len({wanted_of(row) for row in pairs_of(tmp_path / "set")}) == 600
    assert not (tmp_path / "set.unfinished").exists()

    make(tmp_path / "whole", *options)  # the same dataset without an interruption
    for name in ("train.jsonl", "validation.jsonl"):
        assert (tmp_path / "set" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_model_that_knows_no_answers(tmp_path: Path, tiny_model: TinyModel, capsys: Capture) -> None:
    """Use a real engine with a random model; the next start retries the prompts that failed."""
    options = ("--model", str(tiny_model()), "--engine", "torch", "--max-tokens", "4", "--max-attempts", "2")
    assert make(tmp_path / "set", "--num-pairs", "6", *options) == 2
    assert (tmp_path / "set.unfinished").exists()
    message = "only 0 of 6 prompts got an answer with all of the keywords, and 5 are needed"
    assert message in capsys.readouterr().err
    assert make(tmp_path / "set", "--num-pairs", "6", *options) == 2


def test_a_prompt_template_and_answers_too_long_for_the_model(
    tmp_path: Path, tiny_model: TinyModel, scripted: Any, capsys: Capture
) -> None:
    (tmp_path / "mine.txt").write_text("Be brief. {question}")
    options = ("--num-pairs", "5", "--model", str(tiny_model()), "--prompt", str(tmp_path / "mine.txt"))
    message = refusal(capsys, tmp_path / "set", *options, "--max-tokens", "500")
    assert "do not fit the model's positions (512)" in message
    engine = scripted(good)
    assert make(tmp_path / "set", *options) == 0
    assert all(prompt.startswith("Be brief. Write a sentence with the words: ") for prompt in engine.prompts)
    assert read(tmp_path / "set" / "train.jsonl")[0]["prompt"].startswith("Write a sentence")


def test_half_a_line_is_not_a_pair(tmp_path: Path) -> None:
    dataset = KeywordDataset(tmp_path / "set", {"seed": 0})
    for word in "abcdef":
        dataset.add(KeywordPair("p", f"{word}.", (word,)))
    path = dataset.unfinished / "pairs.jsonl"
    path.write_bytes(path.read_bytes()[:-5])  # killed while it wrote
    again = KeywordDataset(tmp_path / "set", {"seed": 0})
    assert list(again.pairs) == [("a",), ("b",), ("c",), ("d",), ("e",)]
    assert again.finish([("f",), ("e",), ("d",), ("c",), ("b",), ("a",)]) == (4, 1)
    assert [row["keywords"] for row in read(tmp_path / "set" / "validation.jsonl")] == [["a"]]
