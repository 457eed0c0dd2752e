"""Examples from JSONL and Parquet files; an error names the file and the line (or row)."""

import json
import math
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_ray.tasks.examples import Example


def read_examples(
    path: str | Path,
    question_field: str,
    answer_field: str,
    answer_marker: str | None = None,
    limit: int | None = None,
) -> list[Example]:
    """The file's examples in file order; at most `limit`, and rows after those are not read.

    With a marker, the ground truth is what follows the marker's last occurrence in the answer.
    """
    path = Path(path)
    rows = islice(_rows(path, question_field, answer_field), limit)
    examples = []
    for place, row in rows:
        question = _text(place, row, question_field)
        answer = _text(place, row, answer_field)
        examples.append(Example(question, _after_marker(place, answer_field, answer, answer_marker)))
    if not examples:
        raise ValueError(f"{path}: holds no examples; give a file with at least one")
    return examples


def _rows(path: Path, question_field: str, answer_field: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(place, row) pairs; the place begins an error message."""
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "there is no such file"
        raise ValueError(f"{path}: {problem}; give the path of a .jsonl or .parquet file")
    if path.suffix == ".jsonl":
        return _jsonl_rows(path)
    if path.suffix == ".parquet":
        return _parquet_rows(path, question_field, answer_field)
    raise ValueError(f"{path}: unknown kind of file {path.suffix!r}; convert it to .jsonl or .parquet")


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open("rb") as file:  # bytes, so that a line that is not UTF-8 can be named
        for number, line in enumerate(file, start=1):
            place = f"{path}, line {number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                row = json.loads(text) if text else None
            except UnicodeDecodeError as error:
                raise ValueError(f"{place}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{place}: not valid JSON ({error.msg}, column {error.colno}); fix the line"
                ) from None
            if not text:
                continue
            if not isinstance(row, dict):
                raise ValueError(f"{place}: holds a {type(row).__name__}; each line must be a JSON object")
            yield place, row


def _parquet_rows(
    path: Path, question_field: str, answer_field: str
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        with pq.ParquetFile(path) as file:
            # A missing column is left to `_text`, which lists the columns that are there.
            wanted = [question_field, answer_field]
            columns = wanted if set(wanted) <= set(file.schema_arrow.names) else None
            number = 0
            for batch in file.iter_batches(batch_size=1024, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except pa.ArrowException as error:
        raise ValueError(f"{path}: not readable as Parquet ({error}); write the file again") from None


def _text(place: str, row: Mapping[str, Any], field: str) -> str:
    if field not in row:
        raise ValueError(
            f"{place}: no field {field!r}; the fields are {', '.join(map(str, row))}. "
            "Set task.question_field and task.answer_field to two of them"
        )
    value = row[field]
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not isinstance(value, str) and not is_number:
        raise ValueError(f"{place}: {field!r} is {value!r}; it must be text or a number")
    text = str(value)
    if not text.strip():
        raise ValueError(f"{place}: {field!r} is empty; fill it in or remove the example")
    return text


def _after_marker(place: str, field: str, answer: str, marker: str | None) -> str:
    if marker is None:
        return answer.strip()
    _, found, tail = answer.rpartition(marker)
    if not found:
        raise ValueError(f"{place}: {field!r} does not contain task.answer_marker {marker!r}: {answer[-80:]!r}")
    if not tail.strip():
        raise ValueError(f"{place}: nothing follows the marker {marker!r} in {field!r}; fill in the answer")
    return tail.strip()
