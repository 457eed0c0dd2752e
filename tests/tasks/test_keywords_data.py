"""The course's `data keywords`: verified pairs from templates and from an engine, and their split."""

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import TinyModel, make_completion

from examples.course.__main__ import run
from examples.course.keyword_data import writers
from examples.course.keyword_data.keyword_dataset import KeywordDataset, KeywordPair
from grpo_ray.config import Config
from grpo_ray.config.task import KeywordsTaskConfig
from grpo_ray.engines.base import EngineDied
from grpo_ray.learning.model_files import load_tokenizer
from grpo_ray.run import preparation
from grpo_ray.tasks import load_examples
from grpo_ray.types import Completion, SamplingSettings


def make(output: Path, *options: str) -> int:
    return run(["data", "keywords", "--output", str(output), *options])


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def pairs_of(folder: Path) -> list[dict[str, Any]]:
    return read(folder / "train.jsonl") + read(folder / "validation.jsonl")


def wanted_of(row: dict[str, Any]) -> frozenset[str]:
    return frozenset(row["keywords"])


def test_pairs_are_verified_split_and_disjoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def refusal(capsys: pytest.CaptureFixture[str], output: Path, *options: str) -> str:
    before = set(output.parent.iterdir())
    assert make(output, *options) == 2
    assert set(output.parent.iterdir()) == before  # nothing was begun
    return capsys.readouterr().err


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_wrong_options_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


class ScriptedEngine:
    """An engine that answers from a script and records the prompts."""

    def __init__(self, tokenizer: Any, script: Callable[[list[str], int], str | Completion]) -> None:
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
        keywords = prompt.rpartition("words: ")[2].split(", ")
        answer = self._script(keywords, self.prompts[prompt])
        await asyncio.sleep(0)  # a real engine never answers immediately
        return (answer if isinstance(answer, Completion) else make_completion([1, 2], text=answer),)

    async def shutdown(self) -> None:
        self.is_shut_down = True


Script = Callable[[list[str], int], str | Completion]


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
    tmp_path: Path, tiny_model: TinyModel, scripted: Any, capsys: pytest.CaptureFixture[str]
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
def test_an_interruption_loses_nothing(
    tmp_path: Path, tiny_model: TinyModel, scripted: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupting(keywords: list[str], attempt: int) -> str:
        if sum(engine.prompts.values()) == 7:
            os.kill(os.getpid(), signals.pop())
        return good(keywords, attempt)

    options = ("--num-pairs", "600", "--model", str(tiny_model()))
    signals, kept = [signal.SIGTERM, signal.SIGINT], list[Any]()
    while signals:
        engine, before = scripted(interrupting), len(kept)
        assert make(tmp_path / "set", *options) == 130
        assert engine.is_shut_down
        kept = read(tmp_path / "set.unfinished" / "pairs.jsonl")
        assert before + 7 <= len(kept) < 600
        message = f"{len(kept)} of 600 pairs are verified and kept in {tmp_path / 'set.unfinished'}"
        assert message in capsys.readouterr().err
        assert not (tmp_path / "set").exists()

    for other in (("--seed", "9"), ("--temperature", "0.3")):
        assert make(tmp_path / "set", *options, *other) == 2
        message = "set.unfinished holds another keyword dataset; give another --output"
        assert message in capsys.readouterr().err
    engine = scripted(good)
    assert make(tmp_path / "set", *options) == 0
    assert f"resuming with {len(kept)} pairs of" in capsys.readouterr().out
    assert sum(engine.prompts.values()) == 600 - len(kept)
    rows = pairs_of(tmp_path / "set")
    assert len({wanted_of(row) for row in rows}) == 600
    assert not (tmp_path / "set.unfinished").exists()

    make(tmp_path / "whole", *options)  # the same dataset without an interruption
    for name in ("train.jsonl", "validation.jsonl"):
        assert (tmp_path / "set" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_an_engine_that_dies_loses_nothing(
    tmp_path: Path, tiny_model: TinyModel, scripted: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def dying(keywords: list[str], attempt: int) -> str:
        if sum(engine.prompts.values()) == 4:
            raise EngineDied("vLLM's engine died: killed")
        return good(keywords, attempt)

    engine = scripted(dying)
    assert make(tmp_path / "set", "--num-pairs", "9", "--model", str(tiny_model())) == 2
    assert engine.is_shut_down
    num_kept = len(read(tmp_path / "set.unfinished" / "pairs.jsonl"))
    assert 3 <= num_kept <= 8
    message = f"vLLM's engine died: killed; {num_kept} of 9 pairs are verified and kept in"
    assert message in capsys.readouterr().err


def test_a_model_that_knows_no_answers(
    tmp_path: Path, tiny_model: TinyModel, capsys: pytest.CaptureFixture[str]
) -> None:
    """Use a real engine with a random model; the next start retries the prompts that failed."""
    options = ("--model", str(tiny_model()), "--engine", "torch", "--max-tokens", "4", "--max-attempts", "2")
    assert make(tmp_path / "set", "--num-pairs", "6", *options) == 2
    assert (tmp_path / "set.unfinished").exists()
    message = "only 0 of 6 prompts got an answer with all of the keywords, and 5 are needed"
    assert message in capsys.readouterr().err
    assert make(tmp_path / "set", "--num-pairs", "6", *options) == 2


def test_a_prompt_template_and_answers_too_long_for_the_model(
    tmp_path: Path, tiny_model: TinyModel, scripted: Any, capsys: pytest.CaptureFixture[str]
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
