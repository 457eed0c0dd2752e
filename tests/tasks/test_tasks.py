"""Tasks: templates, examples from files and the hub, messages, sorting and arithmetic, and mixtures."""

import json
import pickle
import re
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import write_rows
from huggingface_hub import constants
from small_run import QUICKSTART

from grpo_ray.config.loading import load_config
from grpo_ray.config.task import (
    ArithmeticTaskConfig,
    EpisodesTaskConfig,
    FileTaskConfig,
    Gsm8kTaskConfig,
    MathTaskConfig,
    MixtureTaskConfig,
    PlainTask,
    SortingTaskConfig,
)
from grpo_ray.learning.tiny_tokenizer import tiny_tokenizer
from grpo_ray.rewards import get_reward_fn
from grpo_ray.tasks import arithmetic, load_examples
from grpo_ray.tasks.arithmetic import arithmetic_examples
from grpo_ray.tasks.dataset import dataset_examples
from grpo_ray.tasks.examples import Example, ExampleSets
from grpo_ray.tasks.files import Fields, num_rows, read_examples
from grpo_ray.tasks.kinds import KINDS
from grpo_ray.tasks.prompts import Prompter, TextTemplate, load_template
from grpo_ray.tasks.sorting import sorting_examples, warmup_pairs
from grpo_ray.tasks.sources import Source, is_hub_dataset, source_of
from grpo_ray.tools.experiments.experiment import EXPERIMENTS


def test_templates_end_where_the_model_starts() -> None:
    assert load_template("question_only").text == "{question}"
    assert load_template("short").text == "User: {question}\nAssistant: <think>"
    r1_zero = load_template("r1_zero").text
    assert r1_zero.startswith("A conversation between User and Assistant. The User asks")
    assert r1_zero.endswith("<answer> answer here </answer>.\nUser: {question}\nAssistant: <think>")


def test_render_leaves_other_braces_alone() -> None:
    template = TextTemplate('{"q": {question}}')
    assert template.render(r"\frac{1}{2} {x} {question}") == r'{"q": \frac{1}{2} {x} {question}}'


def test_template_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_bytes(b"Q: {question}\r\nA:")
    assert load_template(str(path)).text == "Q: {question}\r\nA:"
    path.write_text("no place")
    with pytest.raises(ValueError, match=r"has no \{question\}"):
        load_template(str(path))
    known = "few_shot_sorting, question_only, r1_zero, short, chat"
    with pytest.raises(ValueError, match=f"'r1zero'.*give one of {known}, or"):
        load_template("r1zero")


def test_every_kind_of_the_configuration_is_registered() -> None:
    assert {config.model_fields["kind"].default for config in get_args(PlainTask)} == KINDS.keys()


def questions_of(sets: ExampleSets) -> set[str]:
    return {example.question for example in (*sets.train, *sets.validation)}


def digits_of(question: str) -> str:
    match = re.fullmatch(r"Sort (\d+)", question)
    assert match
    return match[1]


@pytest.mark.parametrize(("num_terms", "num_digits"), [(1, 3), (2, 1), (3, 2), (4, 4)])
def test_drawn_examples_are_right_distinct_and_seeded(num_terms: int, num_digits: int) -> None:
    """One term is a number to sort."""
    sizes = {"num_digits": num_digits, "num_train_prompts": 200, "num_validation_prompts": 100}
    sums = {"kind": "arithmetic", "num_terms": num_terms, **sizes}
    config: Any = SortingTaskConfig(**sizes) if num_terms == 1 else ArithmeticTaskConfig(**sums)
    sets = load_examples(config, seed=0)
    assert (len(sets.train), len(sets.validation), sets.notices) == (200, 100, ())
    assert len(questions_of(sets)) == 300
    answer: Any = calculated if num_terms > 1 else lambda question: "".join(sorted(digits_of(question)))
    for example in (*sets.train, *sets.validation):
        assert example.ground_truth == str(answer(example.question))
    terms = [re.findall(r"[0-9]+", example.question) for example in sets.train]
    assert {len(found) for found in terms} == {num_terms}
    assert max(len(term) for found in terms for term in found) == num_digits
    symbols = set("".join(example.question for example in sets.train))
    assert symbols >= set("+-*") if num_terms > 1 else any(term.startswith("0") for (term,) in terms)
    assert load_examples(config, seed=0) == sets != load_examples(config, seed=1)


def test_sorting_refuses_too_many_prompts() -> None:
    config = SortingTaskConfig(num_digits=2, num_train_prompts=100, num_validation_prompts=1)
    with pytest.raises(ValueError, match=r"is 101, but task.num_digits = 2 gives only 100"):
        sorting_examples(config, seed=0)


def test_warmup_pairs_show_three_habits_on_other_numbers() -> None:
    config = SortingTaskConfig(num_digits=4, num_train_prompts=2000, num_validation_prompts=64)
    pairs = warmup_pairs(config, seed=3, num_pairs=7936)  # all remaining numbers
    assert pairs == warmup_pairs(config, seed=3, num_pairs=7936)
    questions = {question for question, _ in pairs}
    assert len(questions) == 7936
    assert not questions & questions_of(sorting_examples(config, seed=3))
    counts = dict.fromkeys(("ascending", "descending", "copying"), 0)
    for question, response in pairs:
        digits = digits_of(question)
        ascending = "".join(sorted(digits))
        answers = {"ascending": ascending, "descending": ascending[::-1], "copying": digits}
        habit = response.split()[0]
        assert response == f" {habit} </think> <answer> {answers[habit]} </answer>"
        counts[habit] += 1
    assert [counts[habit] / len(pairs) for habit in counts] == pytest.approx([0.25, 0.45, 0.30], abs=0.02)
    with pytest.raises(ValueError, match=r"7937 examples .* the task's 2064 prompts do not fit into the 10000"):
        warmup_pairs(config, seed=3, num_pairs=7937)


def read(path: Path, question: str, answer: str, marker: str | None = None, limit: int | None = None) -> Any:
    return read_examples(Source(str(path), (path,)), Fields(question, answer, marker), limit)[0]


def test_read_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    lines = '{"q": "1+1?", "a": "so #### no #### 2 "}', "", '{"q": "é", "a": "#### 1,000", "x": null}', "broken"
    path.write_text("\n".join(lines))
    expected = [Example("1+1?", "2"), Example("é", "1,000")]
    assert read(path, "q", "a", "####", limit=2) == expected  # the broken line is not reached
    assert read(path, "q", "a", limit=1) == [Example("1+1?", "so #### no #### 2")]


def test_read_parquet(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    columns = {"q": [str(i) for i in range(3000)], "a": list(range(3000)), "z": [None] * 3000}
    pq.write_table(pa.table(columns), path)
    examples = read(path, "q", "a")
    assert examples == [Example(str(i), str(i)) for i in range(3000)]
    assert read(path, "q", "a", limit=7) == examples[:7]
    with pytest.raises(ValueError, match=r"row 1: no field 'question'; the fields are q, a, z"):
        read(path, "question", "a")
    with pytest.raises(ValueError, match=r"none of its 3,000 rows has a ground truth: no text in 'z'"):
        read(path, "q", "z")


def test_values_of_a_csv_stay_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_bytes('\ufeffq,a,hint\n"Two\nlines, ""é""",007,\n\nb,1e3,x\n'.encode())
    assert read(path, "q", "a") == [Example('Two\nlines, "é"', "007"), Example("b", "1e3")]
    assert [example.place for example in read(path, "q", "a")] == [f"{path}, line 2", f"{path}, line 5"]
    assert num_rows(path) == 2


def test_load_examples(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "data.jsonl", [{"question": f"{i}?", "answer": f"#### {i}"} for i in range(9)])
    fields = {"num_validation_prompts": 3, "answer_marker": "####", "duplicates": "keep"}
    task = FileTaskConfig(train_path=path, validation_path=path, **fields)
    sets = load_examples(task, seed=0)
    assert sets.train == [Example(f"{i}?", str(i)) for i in range(9)]
    assert sets.validation == sets.train[:3]
    assert sets.train[4].place == f"{path}, line 5"
    sets = load_examples(task.model_copy(update={"duplicates": "drop"}), seed=0)
    assert sets.train == [Example(f"{i}?", str(i)) for i in range(3, 9)]
    assert sets.notices == (
        f"{path}: the first 3 of its 9 rows are validated with (task.num_validation_prompts)",
        f"{path}: 3 duplicate questions of {path} kept out of training",
    )


# ---- rows without a ground truth ----


GSM8K = [
    {"question": "1 + 1?", "answer": "1 + 1 = <<1+1=2>>2\n#### 2"},
    {"question": "No answer?", "answer": "It is two."},
    {"question": "A lot?", "answer": "so #### no #### 1,000 "},
    {"question": "Marked, and then nothing?", "answer": "2 ####"},
    {"question": "Null?", "answer": None},
]
MATH = [
    {"problem": "Half?", "solution": r"It is $\boxed{1}$, no, $\boxed{\frac{1}{\sqrt{4}}}$."},
    {"problem": "Unboxed?", "solution": "2"},
    {"problem": "Not closed?", "solution": r"\boxed{2"},
    {"problem": "Empty?", "solution": r"\boxed{ }"},
]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".csv"])
def test_gsm8k_from_files(tmp_path: Path, suffix: str) -> None:
    train = write_rows(tmp_path / f"train{suffix}", GSM8K)
    test = write_rows(tmp_path / f"test{suffix}", [{"question": "v?", "answer": "#### -3"}])
    sets = load_examples(Gsm8kTaskConfig(train_path=train, validation_path=test), seed=0)
    assert sets.train == [Example("1 + 1?", "2"), Example("A lot?", "1,000")]
    assert sets.validation == [Example("v?", "-3")]
    place = f"{train}, {'row' if suffix == '.parquet' else 'line'} {4 if suffix == '.csv' else 2}"
    left_out = "3 rows without a ground truth left out: no text after '####' in 'answer'"
    assert sets.notices == (f"{train}: {left_out}, first in {place}",)
    task = Gsm8kTaskConfig(train_path=train, validation_path=train, num_validation_prompts=2, duplicates="keep")
    assert load_examples(task, seed=0).validation == sets.train  # of rows with a ground truth


def test_math_from_files(tmp_path: Path) -> None:
    train = write_rows(tmp_path / "train.parquet", MATH)
    test = write_rows(tmp_path / "test.jsonl", [{"problem": "v?", "solution": r"\boxed{x^{2}}"}])
    sets = load_examples(MathTaskConfig(train_path=train, validation_path=test), seed=0)
    assert sets.train == [Example("Half?", r"\frac{1}{\sqrt{4}}")]
    assert sets.validation == [Example("v?", "x^{2}")]
    assert "3 rows without a ground truth left out: no \\boxed{...} in 'solution', first in" in sets.notices[0]


@pytest.mark.parametrize(
    ("solution", "truth"),
    [
        (r"so $\boxed{2}$.", "2"),
        (r"first $\boxed{1}$, then $\boxed{\frac{1}{2}}$", r"\frac{1}{2}"),
        (r"so $\boxed {2}$.", "2"),
        (r"so $\fbox{2}$.", "2"),
        (r"so $x = \boxed 2$, as was to be shown.", "2"),
        (r"so \boxed 2", "2"),
        (r"so $\boxed{2$", None),
        (r"so $\boxed{}$", None),
        (r"so $\boxed$", None),
        (r"so $\boxedx 2$", None),
        ("so 2", None),
    ],
)
def test_a_worked_solution_boxes_its_answer_in_several_ways(solution: str, truth: str | None) -> None:
    assert Fields("q", "a", is_boxed=True).ground_truth(solution) == truth


def calculated(question: str) -> int:
    match = re.fullmatch(r"What is ([0-9 +*-]+)\?", question)
    assert match
    return int(eval(match[1]))


def test_arithmetic_with_every_possible_question() -> None:
    sizes = {"num_train_prompts": 99, "num_validation_prompts": 1}
    config = ArithmeticTaskConfig(operations=("-", "-"), num_digits=1, **sizes)
    everything = {f"What is {a} - {b}?" for a in range(10) for b in range(10)}
    assert questions_of(arithmetic_examples(config, seed=0)) == everything
    with pytest.raises(ValueError, match=r"is 101, but task.num_terms = 2 numbers .* give only 100 distinct"):
        arithmetic_examples(config.model_copy(update={"num_train_prompts": 100}), seed=0)


def test_terms_in_ranges_and_no_sum_in_both_orders() -> None:
    sizes = {"num_train_prompts": 255, "num_validation_prompts": 150}
    config = ArithmeticTaskConfig(operations=("+",), ranges=((1, 49), (1, 9)), **sizes)
    sets = arithmetic_examples(config, seed=0)
    terms = [[int(n) for n in re.findall(r"\d+", e.question)] for e in (*sets.train, *sets.validation)]
    everything = {tuple(sorted((a, b))) for a in range(1, 50) for b in range(1, 10)}
    assert len(terms) == len(everything) == 405
    assert {tuple(sorted(each)) for each in terms} == everything
    assert all(1 <= a < 50 and 1 <= b < 10 for a, b in terms)
    with pytest.raises(ValueError, match=r"is 406, but task.ranges give only 405 distinct prompts; widen"):
        arithmetic_examples(config.model_copy(update={"num_train_prompts": 256}), seed=0)
    seen = {tuple(sorted(terms[index])) for index in range(255, 405)}
    for question, _ in arithmetic.warmup_pairs(config, seed=0, num_pairs=1000):
        assert tuple(sorted(int(n) for n in re.findall(r"\d+", question))) not in seen


def test_arithmetic_warmup_excludes_validation_and_is_right_a_third_of_the_time() -> None:
    config = ArithmeticTaskConfig(num_train_prompts=500, num_validation_prompts=2000)
    pairs = arithmetic.warmup_pairs(config, seed=0, num_pairs=4000)
    assert pairs == arithmetic.warmup_pairs(config, seed=0, num_pairs=4000)
    validation = {example.question for example in arithmetic_examples(config, seed=0).validation}
    assert len(pairs) == 4000
    assert not validation & {question for question, _ in pairs}
    right = [f"<answer> {calculated(question)} </answer>" in response for question, response in pairs]
    assert sum(right) / len(pairs) == pytest.approx(0.35, abs=0.03)
    assert [response.split()[0] == "calculate" for _, response in pairs] == right
    few = ArithmeticTaskConfig(num_digits=1, num_train_prompts=200, num_validation_prompts=50)
    assert len(arithmetic.warmup_pairs(few, seed=0, num_pairs=1000)) == 300 - 50


def mixture(**parts: Any) -> MixtureTaskConfig:
    return MixtureTaskConfig.model_validate({"parts": parts})


def test_a_mixtures_examples_know_their_part(tmp_path: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", GSM8K)
    test = write_rows(tmp_path / "test.jsonl", [{"question": "v?", "answer": "#### 4"}])
    task = mixture(
        sums={"task": {"kind": "arithmetic", "num_train_prompts": 3, "num_validation_prompts": 2}},
        school={"weight": 2, "task": {"kind": "gsm8k", "train_path": train, "validation_path": test}},
    )
    config = load_config(QUICKSTART).model_copy(update={"task": task})
    assert config.rewards == {"sums": "exact_match", "school": "r1_zero"}
    sets = load_examples(task, seed=0)
    assert [example.task for example in sets.train] == ["sums"] * 3 + ["school"] * 2
    assert [example.task for example in sets.validation] == ["sums"] * 2 + ["school"]
    assert sets.notices[0].startswith(f"school: {train}: 3 rows without a ground truth")
    assert sets.train[4] == Example("A lot?", "1,000", task="school")


def test_no_part_trains_on_validation_questions_of_another(tmp_path: Path) -> None:
    def part(name: str, train: list[str], test: list[str]) -> dict[str, Any]:
        paths = {}
        for field, questions in (("train", train), ("validation", test)):
            rows = [{"question": question, "answer": "1"} for question in questions]
            paths[f"{field}_path"] = write_rows(tmp_path / f"{field}{name}.jsonl", rows)
        return {"task": {"kind": "file", **paths}}

    task = mixture(one=part("1", ["a", "b", "c"], ["d"]), two=part("2", ["d", "e"], ["b"]))
    sets = load_examples(task, seed=0)
    assert [(e.task, e.question) for e in sets.train] == [("one", "a"), ("one", "c"), ("two", "e")]
    expected = [f"{name}: 1 question of other parts' validation left out" for name in ("one", "two")]
    assert [*sets.notices] == expected
    with pytest.raises(ValueError, match=r"task.parts.one: every training question is one that another"):
        load_examples(mixture(one=part("1", ["a"], ["b"]), two=part("2", ["c"], ["a"])), seed=0)


BOXED_TERMS = [
    [{"reward": "question_only"}, {"reward": "brevity", "weight": 0.1}],
    [{"reward": "graded", "arguments": {"answer_in": "boxed"}}],
]


@pytest.mark.parametrize("reward", ["exact_match", "question_only", "r1_zero", *BOXED_TERMS])
def test_warmed_up_habits_are_in_the_format_and_a_quarter_is_right(reward: Any) -> None:
    config = SortingTaskConfig.model_validate({"reward": reward, "num_digits": 4})
    verdicts = []
    for question, response in warmup_pairs(config, seed=0, num_pairs=2000):
        verdicts.append(get_reward_fn(config.reward)(response, "".join(sorted(digits_of(question)))))
    assert all(verdict["format_reward"] == 1 for verdict in verdicts)
    # Sorted numbers are correct when copied, and 0012 equals 012 as a number.
    assert 0.23 < sum(verdict["answer_reward"] for verdict in verdicts) / len(verdicts) < 0.33


def test_the_few_shot_prompt_is_the_short_one_after_right_examples() -> None:
    few_shot = load_template("few_shot_sorting").render("Sort 51280")
    examples = few_shot.removesuffix(load_template("short").render("Sort 51280"))
    assert examples != few_shot
    found = re.findall(r"User: Sort (\d+)\nAssistant: <think>(.*)\n", examples)
    turns = [f"User: Sort {digits}\nAssistant: <think>{response}\n" for digits, response in found]
    assert "".join(turns) == examples
    right = {"format_reward": 1.0, "answer_reward": 1.0, "reward": 1.0}
    for digits, response in found:
        assert get_reward_fn("exact_match")(response, "".join(sorted(digits))) == right
    assert len(found) == 3
    for config in (QUICKSTART, "configs/cs336-2026.yaml"):  # no example is a question of their first seeds
        task = load_config(config).task
        assert task.kind == "sorting"
        for seed in range(4):
            assert not questions_of(sorting_examples(task, seed)) & {f"Sort {digits}" for digits, _ in found}


VARIANTS = [(name, variant) for name in ("prompt", "cs336-2026") for variant in EXPERIMENTS[name].variants]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_each_variants_longest_response_fits(name: str, variant: str) -> None:
    config = load_config(QUICKSTART, EXPERIMENTS[name].variants[variant])
    assert config.task.kind == "sorting"
    tokenizer, template = tiny_tokenizer(config), load_template(config.task.prompt)
    for question, response in warmup_pairs(config.task, seed=5, num_pairs=300):
        num_tokens = len(tokenizer(response, add_special_tokens=False)["input_ids"]) + 1  # the end token
        prompt = tokenizer(template.render(question), add_special_tokens=False)["input_ids"]
        assert num_tokens <= config.sampling.max_tokens
        assert len(prompt) + config.sampling.max_tokens <= config.model.tiny.max_position_embeddings
        assert not any(stop in response and not response.endswith(stop) for stop in config.sampling.stop)


# ---- datasets on the hub, in its local cache ----


COMMIT = "e53f048856ff4f594e959d75785d2c2d37b678ee"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty cache of the hub, without a connection to it."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def cached(hub: Path, name: str, files: dict[str, Any], revision: str = "main") -> Path:
    """Put a dataset into the cache; `files` are a text, or rows for Parquet, by file name."""
    folder = hub / f"datasets--{name.replace('/', '--')}"
    (folder / "refs" / revision).parent.mkdir(parents=True, exist_ok=True)
    (folder / "refs" / revision).write_text(COMMIT)
    snapshot = folder / "snapshots" / COMMIT
    for file, content in files.items():
        path = snapshot / file
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.write_text(content)
        else:
            write_rows(path, content)
    return snapshot


def row(number: int) -> list[dict[str, str]]:
    return [{"question": f"{number}?", "answer": f"#### {number}"}]


CARD = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path:
    - socratic/train-*
---
# GSM8K
"""
GSM8K_ON_THE_HUB = {
    "README.md": CARD,
    "main/train-00001-of-00002.parquet": row(2),
    "main/train-00000-of-00002.parquet": row(1),
    "main/test-00000-of-00001.parquet": row(3),
    "socratic/train-00000-of-00001.parquet": row(4),
}


def test_gsm8k_by_its_name(hub: Path) -> None:
    snapshot = cached(hub, "openai/gsm8k", GSM8K_ON_THE_HUB)
    sets = load_examples(Gsm8kTaskConfig(), seed=0)
    assert sets.train == [Example("1?", "1"), Example("2?", "2")]
    assert sets.validation == [Example("3?", "3")]
    assert sets.train[0].place == f"{snapshot}/main/train-00000-of-00002.parquet, row 1"
    assert source_of(Gsm8kTaskConfig(), "train").name == "openai/gsm8k (train)"


def test_math_by_its_name_takes_the_default_subset(hub: Path) -> None:
    card = "configs:\n- config_name: algebra\n  data_files: algebra/*\n- config_name: default\n  data_files:\n"
    card += "  - {split: train, path: data/train-*}\n  - {split: test, path: data/test-*}\n"
    rows = [{"problem": "p?", "solution": r"\boxed{1}"}]
    files = {"data/train-0.parquet": rows, "data/test-0.parquet": [{**rows[0], "problem": "v?"}]}
    others = {"algebra/train-0.parquet": [{**rows[0], "problem": "twice?"}]}
    cached(hub, "DigitalLearningGmbH/MATH-lighteval", {"README.md": f"---\n{card}---\n", **files, **others})
    sets = load_examples(MathTaskConfig(), seed=0)
    assert (sets.train, sets.validation) == ([Example("p?", "1")], [Example("v?", "1")])


def test_a_subset_and_a_revision(hub: Path) -> None:
    cached(hub, "openai/gsm8k", GSM8K_ON_THE_HUB, revision="v2")
    task = Gsm8kTaskConfig(subset="socratic", revision="v2")
    assert [path.name for path in source_of(task, "train").files] == ["train-00000-of-00001.parquet"]
    with pytest.raises(ValueError, match=r"has no split 'test' in 'socratic'; set it to one of train$"):
        source_of(task, "validation")
    with pytest.raises(ValueError, match=r"has no subset 'x'; set task.subset to one of main, socratic$"):
        source_of(Gsm8kTaskConfig(subset="x", revision="v2"), "train")
    with pytest.raises(ValueError, match=r"has several subsets; set task.subset to one of main, socratic$"):
        source_of(Gsm8kTaskConfig(subset=None, revision="v2"), "train")


@pytest.mark.parametrize(
    ("files", "subset", "expected"),
    [
        (["train.jsonl", "test.jsonl", "notes.txt"], None, ["train.jsonl"]),
        (["data/train-0.parquet", "data/train-1.parquet", "data/test-0.parquet"], None,
         ["data/train-0.parquet", "data/train-1.parquet"]),
        (["main/train/0000.parquet", "main/test/0000.parquet", "other/train/0000.parquet"], "main",
         ["main/train/0000.parquet"]),
        (["train.jsonl", "train.parquet", "training.parquet", "pretrain.parquet"], None, ["train.parquet"]),
        (["data/train-0.parquet", "data/train_sft-0.parquet"], None, ["data/train-0.parquet"]),
    ],
)  # fmt: skip
def test_files_without_a_card(hub: Path, files: list[str], subset: str | None, expected: list[str]) -> None:
    snapshot = cached(hub, "me/data", dict.fromkeys(files, "{}"))
    task = FileTaskConfig(train_path="me/data", validation_path="me/data", subset=subset)
    assert source_of(task, "train").files == tuple(snapshot / name for name in expected)


def test_subsets_without_a_card_are_not_mixed_and_a_missing_split_is_refused(hub: Path) -> None:
    cached(hub, "me/data", dict.fromkeys(["main/train-0.parquet", "socratic/train-0.parquet"], "{}"))
    task = FileTaskConfig(train_path="me/data", validation_path="me/data")
    with pytest.raises(ValueError, match=r"several folders with it; set task.subset to one of main, socratic$"):
        source_of(task, "train")
    with pytest.raises(ValueError, match=r"task.validation_path: the dataset 'me/data' .* 'test'; look"):
        source_of(task, "validation")


def test_a_missing_dataset_is_refused(hub: Path) -> None:
    with pytest.raises(ValueError, match=r"task.train_path: 'openai/gsm8k' is not a local file") as caught:
        load_examples(Gsm8kTaskConfig(), seed=0)
    assert str(caught.value).endswith("download it beforehand: hf download --repo-type dataset openai/gsm8k")


def test_paths_that_name_a_dataset_on_the_hub(here: Path) -> None:
    (here / "data" / "here").mkdir(parents=True)
    assert is_hub_dataset("openai/gsm8k")
    assert is_hub_dataset("me/data-v1.5")
    for path in ("./a/b", "../a/b", "/a/b", "a", "a/b/c", "data/here"):
        assert not is_hub_dataset(path), path
    for file in ("data/train.jsonl", "data/x.parquet", "a/b.csv"):
        assert not is_hub_dataset(file), file


# ---- rows with a list of messages in place of a question ----


USER = {"role": "user", "content": "What is 3 + 4?"}
SYSTEM = {"role": "system", "content": "Answer \u00e4s a number."}
EARLIER = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes?"}]


class Tokenizer:
    """A tokenizer with a chat template that shows every message."""

    chat_template = "a template"

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> str:
        assert (tokenize, add_generation_prompt) == (False, True)
        return "".join(f"[{m['role']}]{m['content']}" for m in conversation) + "[assistant]"

    def __call__(self, texts: list[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [list(text.encode()) for text in texts]}


def asked(folder: Path, *questions: Any, kind: str = "jsonl") -> list[Example]:
    rows = [{"messages": question, "answer": str(number)} for number, question in enumerate(questions)]
    validation = write_rows(folder / "validation.jsonl", [{"messages": "plain", "answer": "0"}])
    paths = {"train_path": write_rows(folder / f"rows.{kind}", rows), "validation_path": validation}
    return list(dataset_examples(FileTaskConfig(**paths, question_field="messages", prompt="chat"), 0).train)


def prompts(examples: list[Example], system_prompt: str | None = None) -> list[str]:
    prompter = Prompter(load_template("chat", system_prompt), Tokenizer())
    return [prompter.item(0, example).prompt for example in examples]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_messages_go_through_the_chat_template(tmp_path: Path, kind: str) -> None:
    examples = asked(tmp_path, [USER], [SYSTEM, *EARLIER, USER], kind=kind)
    alone = "[user]What is 3 + 4?[assistant]"
    whole = f"[system]Answer \u00e4s a number.[user]Hello[assistant]Yes?{alone}"
    assert prompts(examples) == [alone, whole]
    assert prompts(examples, "Be brief.") == [f"[system]Be brief.{alone}", whole]
    assert prompts(pickle.loads(pickle.dumps(examples))) == [alone, whole]


def test_text_and_messages_may_be_mixed_in_a_file(tmp_path: Path) -> None:
    texts = ["Say 3", json.dumps([SYSTEM])]  # a text that looks like messages is still a text
    expected = [f"[user]{text}[assistant]" for text in (*texts, USER["content"])]
    assert prompts(asked(tmp_path, *texts, [USER])) == expected


def test_an_episode_begins_with_a_text(tmp_path: Path) -> None:
    asked(tmp_path, "Say 3", [USER])
    rows, validation = tmp_path / "rows.jsonl", tmp_path / "validation.jsonl"
    files = {"examples": str(rows), "validation_examples": str(validation)}
    task = EpisodesTaskConfig(episode="games:play", question_field="messages", **files)
    with pytest.raises(ValueError, match="line 2: the question is a list of messages, but an episode"):
        load_examples(task, 0)


def test_dots_lead_into_nested_fields(tmp_path: Path) -> None:
    rows = [{"prompt": "Say 3", "reward_model": {"ground_truth": "3"}, "a.b": "x"}]
    path = write_rows(tmp_path / "rows.parquet", rows)
    paths = {"train_path": path, "validation_path": path, "duplicates": "keep"}
    for field, truth in (("reward_model.ground_truth", "3"), ("a.b", "x")):
        task = FileTaskConfig(**paths, question_field="prompt", answer_field=field)
        assert [e.ground_truth for e in dataset_examples(task, 0).train] == [truth]
    task = FileTaskConfig(**paths, question_field="prompt", answer_field="reward_model.style")
    with pytest.raises(ValueError, match=r"no field '.*style'; the fields are prompt, reward_model, a.b"):
        dataset_examples(task, 0)


def test_a_template_that_drops_a_message_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    show = Tokenizer.apply_chat_template
    monkeypatch.setattr(Tokenizer, "apply_chat_template", lambda self, m, **how: show(self, m[-1:], **how))
    assert prompts(asked(tmp_path, [USER])) == ["[user]What is 3 + 4?[assistant]"]
    with pytest.raises(ValueError, match=r"leaves out a message of role 'system' \('Be brief.'\)"):
        prompts(asked(tmp_path, [USER]), "Be brief.")


def test_a_template_of_text_refuses_messages(tmp_path: Path) -> None:
    prompter = Prompter(load_template("r1_zero"), Tokenizer())
    with pytest.raises(ValueError, match=r"rows.jsonl, line 1: .* only task.prompt `chat` renders; "):
        prompter.item(0, asked(tmp_path, [USER])[0])


@pytest.mark.parametrize(
    ("messages", "part"),
    [
        ([], r"line 1: 'messages' has messages of nothing; the last must be the user's"),
        (EARLIER, r"'messages' has messages of user, assistant; the last must be the user's"),
        ([USER, SYSTEM, USER], r"messages of user, system, user; .* a system message must be the first"),
        ([USER, "x"], r"'messages'\[1\] is 'x'; each message must have a `role` of system, user, assistant,"),
        ([{"role": "tool", "content": "3"}, USER], r"'messages'\[0\] is .*'tool'"),
        ([{"role": ["user"], "content": "3"}], r"'messages'\[0\] is .*each message"),
        ([{**USER, "tool_calls": [1]}], r"'messages'\[0\] is .*and nothing else"),
        ([{**USER, "content": [{"type": "image"}]}], r"'messages'\[0\] is .*'image'.* a `content` of text"),
        ([{"role": "user", "content": " "}], r"'messages' is empty; fill it in"),
    ],
)
def test_wrong_messages_are_refused_by_their_place(tmp_path: Path, messages: Any, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        asked(tmp_path, messages)
