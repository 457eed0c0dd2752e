"""A log of one line per step, read as a stream."""

import json
from pathlib import Path

import pytest

from grpo_ray.records.run_files import last_of_each_step
from grpo_ray.records.step_lines import StepLines


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"step": 1, "a": 1.5}\n',
        '{"step": 1}\n{"step": 2, "a": 0}\n{"step": 1, "a": 3}\n{"step": 4, "a": null}\n',  # step 1 twice
        '{"a": 1, "step": 7}\n{"step":6}\n{"step": 12}\n',  # as another program might write it
        '{"step": 3, "a": "é"}\n{"step": 4, "a"',  # killed while it wrote
    ],
)
def test_rows_are_those_of_the_whole_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text, encoding="utf-8")
    lines = StepLines(path)
    expected = last_of_each_step(path)
    assert [list(lines), list(lines)] == [expected, expected]  # more than once
    assert list(lines.steps) == [row["step"] for row in expected]
    assert len(lines) == len(expected)


def test_a_file_that_does_not_exist_has_no_rows(tmp_path: Path) -> None:
    assert list(StepLines(tmp_path / "none.jsonl")) == []


def test_a_file_that_grows_keeps_the_rows_that_were_found(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    lines = StepLines(path)
    with path.open("a") as file:
        file.write(json.dumps({"step": 3}) + "\n")
    assert [row["step"] for row in lines] == [1, 2]


@pytest.mark.parametrize("line", ['{"step": 2, "a": }', "garbage", '{"step": 2, "a": "\udcff"}'])
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n'.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2: not valid JSON .* remove the line"):
        list(StepLines(path))
