"""Tasks: templates, the sorting task, and examples from files."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_ray.config_task import FileTaskConfig, SortingTaskConfig
from grpo_ray.tasks import load_examples
from grpo_ray.tasks.examples import Example
from grpo_ray.tasks.files import read_examples
from grpo_ray.tasks.prompts import load_template, render
from grpo_ray.tasks.sorting import sorting_examples, warmup_pairs

# ---- templates ----


def test_templates_end_where_the_model_starts() -> None:
    assert load_template("short") == "User: {question}\nAssistant: <think>"
    r1_zero = load_template("r1_zero")
    assert r1_zero.startswith("A conversation between User and Assistant. The User asks")
    assert r1_zero.endswith("<answer> answer here </answer>.\nUser: {question}\nAssistant: <think>")


def test_render_leaves_other_braces_alone() -> None:
    assert render('{"q": {question}}', r"\frac{1}{2} {x}") == r'{"q": \frac{1}{2} {x}}'


def test_template_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_bytes(b"Q: {question}\r\nA:")
    assert load_template(str(path)) == "Q: {question}\r\nA:"
    path.write_text("no place")
    with pytest.raises(ValueError, match=r"has no \{question\}"):
        load_template(str(path))
    with pytest.raises(ValueError, match=r"'r1zero'.*give one of question_only, r1_zero, short"):
        load_template("r1zero")


# ---- sorting ----


def digits_of(question: str) -> str:
    match = re.fullmatch(r"Sort (\d+)", question)
    assert match
    return match[1]


def test_sorting_examples_are_distinct_and_seeded() -> None:
    config = SortingTaskConfig(num_digits=3, num_train_prompts=900, num_validation_prompts=100)
    train, validation = sorting_examples(config, seed=0)
    assert (len(train), len(validation)) == (900, 100)
    assert len({example.question for example in train + validation}) == 1000
    assert all(example.ground_truth == "".join(sorted(digits_of(example.question))) for example in train)
    assert any(digits_of(example.question).startswith("0") for example in train)
    assert sorting_examples(config, seed=0) == (train, validation)
    assert sorting_examples(config, seed=1) != (train, validation)


def test_sorting_refuses_too_many_prompts() -> None:
    config = SortingTaskConfig(num_digits=2, num_train_prompts=100, num_validation_prompts=1)
    with pytest.raises(ValueError, match=r"is 101, but task.num_digits = 2 gives only 100"):
        sorting_examples(config, seed=0)


def test_warmup_pairs_are_three_habits_on_other_numbers() -> None:
    config = SortingTaskConfig(num_digits=4, num_train_prompts=2000, num_validation_prompts=64)
    pairs = warmup_pairs(config, seed=3, num_pairs=7936)  # every number that is left
    assert pairs == warmup_pairs(config, seed=3, num_pairs=7936)
    train, validation = sorting_examples(config, seed=3)
    questions = {question for question, _ in pairs}
    assert len(questions) == 7936
    assert not questions & {example.question for example in train + validation}
    counts = dict.fromkeys(("ascending", "descending", "copying"), 0)
    for question, response in pairs:
        digits = digits_of(question)
        ascending = "".join(sorted(digits))
        answers = {"ascending": ascending, "descending": ascending[::-1], "copying": digits}
        habit = response.split()[0]
        assert response == f" {habit} </think> <answer> {answers[habit]} </answer>"
        counts[habit] += 1
    shares = [counts[habit] / len(pairs) for habit in counts]
    assert shares == pytest.approx([0.25, 0.45, 0.30], abs=0.02)
    with pytest.raises(ValueError, match=r"7937 examples .* the task's 2064 prompts do not fit into the 10000"):
        warmup_pairs(config, seed=3, num_pairs=7937)


# ---- files ----


def write_jsonl(folder: Path, *lines: Any) -> Path:
    path = folder / "data.jsonl"
    path.write_bytes(b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines))
    return path


def test_read_jsonl(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path,
        {"q": "1+1?", "a": "so #### no #### 2 "},
        b"",
        {"q": "é", "a": "#### 1,000", "x": None},
        b"broken",
    )
    expected = [Example("1+1?", "2"), Example("é", "1,000")]
    assert read_examples(path, "q", "a", "####", limit=2) == expected  # the broken line is never reached
    assert read_examples(path, "q", "a", limit=1) == [Example("1+1?", "so #### no #### 2")]


def test_read_parquet(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    pq.write_table(
        pa.table({"q": [str(i) for i in range(3000)], "a": list(range(3000)), "z": [None] * 3000}), path
    )
    examples = read_examples(path, "q", "a")
    assert examples == [Example(str(i), str(i)) for i in range(3000)]
    assert read_examples(path, "q", "a", limit=7) == examples[:7]
    with pytest.raises(ValueError, match=r"row 1: no field 'question'; the fields are q, a, z"):
        read_examples(path, "question", "a")
    with pytest.raises(ValueError, match=r"row 1: 'z' is None; it must be text or a number"):
        read_examples(path, "q", "z")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{'q': 1}", "line 2: not valid JSON"),
        (b"[1, 2]", "line 2: holds a list; each line must be a JSON object"),
        ({"q": "x", "answer": "y"}, "line 2: no field 'a'; the fields are q, answer"),
        ({"q": "x", "a": None}, "line 2: 'a' is None; it must be text or a number"),
        ({"q": "x", "a": True}, "line 2: 'a' is True"),
        (b'{"q": "x", "a": NaN}', "line 2: 'a' is nan"),
        ({"q": ["x"], "a": "1"}, r"line 2: 'q' is \['x'\]"),
        ({"q": "  ", "a": "#### 1"}, "line 2: 'q' is empty"),
        ({"q": "x", "a": "the answer is 3"}, "line 2: 'a' does not contain task.answer_marker '####'"),
        ({"q": "x", "a": "3 #### "}, "line 2: nothing follows the marker"),
        (b'{"q": "caf\xe9", "a": "#### 1"}', "line 2: byte 10 is not UTF-8"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, line: Any, message: str) -> None:
    path = write_jsonl(tmp_path, {"q": "fine", "a": "#### 1"}, line)
    with pytest.raises(ValueError, match=message) as caught:
        read_examples(path, "q", "a", "####")
    assert str(path) in str(caught.value)


def test_wrong_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no such file"):
        read_examples(tmp_path / "none.jsonl", "q", "a")
    with pytest.raises(ValueError, match=r"is a folder; give the path of"):
        read_examples(tmp_path, "q", "a")
    (tmp_path / "data.csv").write_text("q,a\n1,2\n")
    with pytest.raises(ValueError, match=r"unknown kind of file '.csv'; convert it"):
        read_examples(tmp_path / "data.csv", "q", "a")
    with pytest.raises(ValueError, match=r"holds no examples"):
        read_examples(write_jsonl(tmp_path), "q", "a")
    pq.write_table(
        pa.table({"q": pa.array([], pa.string()), "a": pa.array([], pa.string())}), tmp_path / "e.parquet"
    )
    with pytest.raises(ValueError, match=r"holds no examples"):
        read_examples(tmp_path / "e.parquet", "q", "a")
    (tmp_path / "bad.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(ValueError, match=r"bad.parquet: not readable as Parquet"):
        read_examples(tmp_path / "bad.parquet", "q", "a")


def test_load_examples(tmp_path: Path) -> None:
    sets = load_examples(SortingTaskConfig(num_train_prompts=5, num_validation_prompts=2), seed=0)
    assert (len(sets.train), len(sets.validation), sets.notices) == (5, 2, ())
    path = str(write_jsonl(tmp_path, *({"question": f"{i}?", "answer": f"#### {i}"} for i in range(9))))
    task = FileTaskConfig(
        train_path=path, validation_path=path, num_validation_prompts=3, answer_marker="####", duplicates="keep"
    )
    sets = load_examples(task, seed=0)
    assert sets.train == [Example(f"{i}?", str(i)) for i in range(9)]
    assert sets.validation == sets.train[:3]
    assert sets.train[4].place == f"{path}, line 5"
    sets = load_examples(task.model_copy(update={"duplicates": "drop"}), seed=0)
    assert sets.train == [Example(f"{i}?", str(i)) for i in range(3, 9)]
    assert sets.notices == (f"{path}: 3 duplicate questions of {path} kept out of training",)
