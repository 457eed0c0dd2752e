"""Examples from JSONL and Parquet files; an error names the file and the line (or row)."""

import json
import math
from collections.abc import Iterator, Mapping
from itertools import count, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_ray.tasks.examples import Example

MAX_LINE_BYTES = 16 * 2**20  # a line is read as a whole, and one of gigabytes is no example


def read_examples(
    path: str | Path,
    question_field: str,
    answer_field: str,
    answer_marker: str | None = None,
    limit: int | None = None,
) -> list[Example]:
    """The file's examples in file order; at most `limit`, and rows after those are not read.

    With a marker, the ground truth is what follows the marker's last occurrence in the answer.

    Raises:
        ValueError: the file cannot be read, holds no examples, or one that is not right.
    """
    path = Path(path)
    examples = []
    try:
        for place, row in islice(_rows(path, question_field, answer_field), limit):
            question = _text(place, row, question_field)
            answer = _text(place, row, answer_field)
            truth = _after_marker(place, answer_field, answer, answer_marker)
            examples.append(Example(question, truth, place))
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read ({error.strerror or error}); give a file that you may read"
        ) from None
    if not examples:
        raise ValueError(f"{path}: holds no examples; give a file with at least one")
    return examples


def _rows(path: Path, question_field: str, answer_field: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(place, row) pairs; the place begins an error message."""
    if not path.exists():
        raise ValueError(f"{path}: there is no such file; give the path of a .jsonl or .parquet file")
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "no regular file"
        raise ValueError(f"{path}: is {kind}; give the path of a .jsonl or .parquet file")
    if path.suffix == ".jsonl":
        return _jsonl_rows(path)
    if path.suffix == ".parquet":
        return _parquet_rows(path, question_field, answer_field)
    raise ValueError(f"{path}: unknown kind of file {path.suffix!r}; convert it to .jsonl or .parquet")


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open("rb") as file:  # bytes, so that a line that is not UTF-8 can be named
        for number in count(1):
            place = f"{path}, line {number}"
            line = file.readline(MAX_LINE_BYTES + 1)
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(
                    f"{place}: longer than {MAX_LINE_BYTES // 2**20} MiB; "
                    "write one example a line, each a JSON object, and remove this one if it is one"
                )
            if not line:
                return
            row = _json_row(place, line, "utf-8-sig" if number == 1 else "utf-8")
            if row is not None:
                yield place, row


def _json_row(place: str, line: bytes, encoding: str) -> Mapping[str, Any] | None:
    """The line's object; None for a blank line."""
    try:
        text = line.decode(encoding).strip()
        row = json.loads(text) if text else {}
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not valid JSON ({error.msg}, column {error.colno}); fix the line") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; lists in lists in lists
        raise ValueError(f"{place}: not usable as JSON ({error}); fix the line") from None
    if not isinstance(row, dict):
        raise ValueError(f"{place}: holds a {type(row).__name__}; each line must be a JSON object")
    return row if text else None


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
                for row in _batch_rows(path, batch, number):
                    number += 1
                    yield f"{path}, row {number}", row
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # the system's, not Arrow's own
            raise
        raise ValueError(f"{path}: not readable as Parquet ({error}); write the file again") from None


def _batch_rows(path: Path, batch: pa.RecordBatch, num_before: int) -> list[dict[str, Any]]:
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:  # somewhere in the batch: find it
        for index in range(batch.num_rows):
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                try:
                    column[index].as_py()
                except UnicodeDecodeError as error:
                    raise ValueError(
                        f"{path}, row {num_before + index + 1}: byte {error.start} of {name!r} is not UTF-8; "
                        "write the column as UTF-8 text"
                    ) from None
        raise


def _text(place: str, row: Mapping[str, Any], field: str) -> str:
    if field not in row:
        raise ValueError(
            f"{place}: no field {field!r}; the fields are {', '.join(map(str, row))}. "
            "Set task.question_field and task.answer_field to two of them"
        )
    value = row[field]
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    is_number = is_integer or (isinstance(value, float) and math.isfinite(value))
    if not isinstance(value, str) and not is_number:
        raise ValueError(f"{place}: {field!r} is {repr(value)[:80]}; it must be text or a number")
    text = str(value)
    if not text.strip():
        raise ValueError(f"{place}: {field!r} is empty; fill it in or remove the example")
    if "\0" in text:
        raise ValueError(f"{place}: {field!r} holds a NUL character; remove it, or see what damaged the file")
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can write it as an escape, UTF-8 cannot, and no tokenizer takes it
        raise ValueError(
            f"{place}: {field!r} holds half of a surrogate pair, which is no text; write the character whole"
        ) from None
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
