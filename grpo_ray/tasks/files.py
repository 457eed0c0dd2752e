"""Reading examples from JSONL, Parquet and CSV files; every error names the file and the line (or row)."""

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_ray.errors import counted
from grpo_ray.records.rollout_log import damage_named
from grpo_ray.rewards.math.text import brace_pairs
from grpo_ray.tasks.examples import Example, conversation_of
from grpo_ray.tasks.sources import FILE_KINDS, LOCAL_SUFFIXES, Source

BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
MAX_LINE_BYTES = 16 * 2**20  # a line is read as a whole, and no example has gigabytes


@dataclass(frozen=True)
class Fields:
    """The fields of a row with its question and its ground truth."""

    question: str
    answer: str
    marker: str | None = None  # the ground truth follows the marker's last occurrence in the answer
    is_boxed: bool = False  # the ground truth is in the last `\boxed{}` of the answer
    keeps_row: bool = False  # for code of the user's that asks for other columns

    def ground_truth(self, answer: str) -> str | None:
        """Read the ground truth from a row's answer; None if it has none."""
        if self.is_boxed:
            return _boxed(answer)
        if self.marker is None:
            return answer.strip() or None
        _, found, tail = answer.rpartition(self.marker)
        return tail.strip() or None if found else None

    @property
    def missing_part(self) -> str:
        """The part that a row without a ground truth lacks, for messages."""
        if self.is_boxed:
            return rf"\boxed{{...}} in {self.answer!r}"
        if self.marker is None:
            return f"text in {self.answer!r}"
        return f"text after {self.marker!r} in {self.answer!r}"


def read_examples(source: Source, fields: Fields, limit: int | None = None) -> tuple[list[Example], list[str]]:
    """Read the examples of all files in order; rows without a ground truth are left out, with a notice.

    At most `limit` examples are returned; the rows after them are not read.

    Raises:
        ValueError: a file cannot be read, a row is not valid, or none is left.
    """
    examples: list[Example] = []
    without: list[str] = []  # places
    names = (fields.question, fields.answer)
    rows = chain.from_iterable(read_rows(path, () if fields.keeps_row else names) for path in source.files)
    for place, row in rows:
        row = _with_nested(row, names)
        question = _question_of(place, row, fields.question)
        truth = fields.ground_truth(answer_of(place, row, fields.answer))
        if truth is None:
            without.append(place)
        else:
            facts = facts_of(row, names) if fields.keeps_row else ""
            examples.append(Example(question, truth, place, facts=facts))
        if len(examples) == limit:
            break
    if not examples and without:
        raise ValueError(
            f"{source.name}: none of its {counted(len(without), 'row')} has a ground truth: no "
            f"{fields.missing_part}; set task.answer_field, task.answer_marker and task.answer_is_boxed to "
            "match how the answers are written"
        )
    if not examples:
        raise ValueError(f"{source.name}: holds no examples; give a file with at least one")
    left_out = f"{source.name}: {counted(len(without), 'row')} without a ground truth left out"
    return examples, [f"{left_out}: no {fields.missing_part}, first in {without[0]}"] if without else []


def _with_nested(row: Mapping[str, Any], names: Sequence[str]) -> Mapping[str, Any]:
    """Add the values that names such as `reward_model.ground_truth` lead to, unless they are columns."""
    for name in names:
        value: Any = row
        for part in [] if name in row else name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None and value is not row:
            row = {**row, name: value}
    return row


def facts_of(row: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return `Example.facts` of a row; what JSON does not have becomes text."""
    others = {name: value for name, value in row.items() if name not in names}
    return json.dumps({"row": others, "fields": {name: row[name] for name in names}}, default=str)


def _boxed(solution: str) -> str | None:
    r"""Return what the last box holds, in any of MATH's notations: `\boxed{2}`, `\fbox{2}`, `$\boxed 2$`."""
    *_, box = [None, *BOX.finditer(solution)]
    if box is None:
        return None
    rest = solution[box.end() :]
    end = brace_pairs(rest).get(0) if rest.startswith("{") else 0
    if end is None:
        return None
    text = rest[1:end] if end else re.split(r"[$\n]", rest)[0]
    return text.strip() or None


def read_rows(path: Path, fields: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (place, row) pairs; the place is for messages, and other columns than `fields` may be missing.

    Without `fields` all columns are there.

    Raises:
        ValueError: the file cannot be read, or a line is not valid.
    """
    try:
        if not path.exists():
            raise ValueError(f"{path}: there is no such file; give the path of a {FILE_KINDS} file")
        if not path.is_file():
            kind = "a folder" if path.is_dir() else "not a regular file"
            raise ValueError(f"{path}: is {kind}; give the path of a {FILE_KINDS} file")
        if path.suffix not in LOCAL_SUFFIXES:
            raise ValueError(f"{path}: unknown kind of file {path.suffix!r}; convert it to {FILE_KINDS}")
        if path.suffix == ".parquet":
            yield from _parquet_rows(path, fields)
        else:
            yield from _jsonl_rows(path) if path.suffix == ".jsonl" else _csv_rows(path)
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read ({error.strerror or error}); give a file that you may read"
        ) from None


def num_rows(path: Path) -> int:
    """Count the rows of a file that was readable; blank lines count as well."""
    if path.suffix == ".parquet":
        return int(pq.ParquetFile(path).metadata.num_rows)
    if path.suffix == ".csv":  # a value may have several lines
        return sum(1 for _ in _csv_rows(path))
    with path.open("rb") as file:
        return sum(1 for _ in file)


def _csv_rows(path: Path) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield the rows below the line of names; each value is text, so that an answer such as 007 stays one."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        csv.field_size_limit(MAX_LINE_BYTES)
        rows = csv.DictReader(file, strict=True)
        try:
            _check_names(path, rows.fieldnames or ())
            for row in rows:
                num_breaks = sum(value.count("\n") for value in row.values() if isinstance(value, str))
                place = f"{path}, line {rows.line_num - num_breaks}"
                if None in row or None in row.values():
                    raise ValueError(f"{place}: not as many values as columns; quote values with commas")
                yield place, row
        except (csv.Error, UnicodeDecodeError) as error:
            place = f"{path}, at or after line {max(1, rows.line_num)}"
            raise ValueError(f"{place}: not valid CSV in UTF-8 ({error}); save the file again") from None


def _check_names(path: Path, names: Sequence[str]) -> None:
    if repeated := [name for name, times in Counter(names).items() if name and times > 1]:
        raise ValueError(f"{path}: has more than one column {repeated[0]!r}; remove or rename all but one")


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open("rb") as file:  # bytes, so that a line that is not UTF-8 can be named
        for number in count(1):
            place = f"{path}, line {number}"
            line = file.readline(MAX_LINE_BYTES + 1)
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(
                    f"{place}: longer than {MAX_LINE_BYTES // 2**20} MiB; "
                    "write one example per line, each a JSON object; if this line is one example, remove it"
                )
            if not line:
                return
            row = _json_row(place, line, "utf-8-sig" if number == 1 else "utf-8")
            if row is not None:
                yield place, row


def _json_row(place: str, line: bytes, encoding: str) -> Mapping[str, Any] | None:
    """Parse the line's object; None for a blank line."""
    try:
        text = line.decode(encoding).strip()
        row = json.loads(text) if text else {}
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not valid JSON ({error.msg}, column {error.colno}); fix the line") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; deeply nested lists
        raise ValueError(f"{place}: not usable as JSON ({error}); fix the line") from None
    if not isinstance(row, dict):
        raise ValueError(f"{place}: holds a {type(row).__name__}; each line must be a JSON object")
    return row if text else None


def _parquet_rows(path: Path, fields: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    text = "not readable as Parquet ({}); write the file again"
    with damage_named(path, text), pq.ParquetFile(path) as file:
        _check_names(path, file.schema_arrow.names)
        # `text_of` reports a missing column, and lists those that exist.
        columns = list(fields) if fields and set(fields) <= set(file.schema_arrow.names) else None
        number = 0
        for batch in file.iter_batches(batch_size=1024, columns=columns):
            for row in _batch_rows(path, batch, number):
                number += 1
                yield f"{path}, row {number}", row


def _batch_rows(path: Path, batch: pa.RecordBatch, num_before: int) -> list[dict[str, Any]]:
    try:
        return list(batch.to_pylist())
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


def _question_of(place: str, row: Mapping[str, Any], field: str) -> str:
    """Return the row's question: text, or a list of messages."""
    value = row.get(field)
    if not isinstance(value, list) or (value and not isinstance(value[0], dict)):
        return text_of(place, row, field)
    question = conversation_of(place, field, value)
    for message in question.messages:  # each is text that a tokenizer can take
        text_of(place, {field: message["content"]}, field)
    return question


def answer_of(place: str, row: Mapping[str, Any], field: str) -> str:
    """Return the row's answer as `text_of` does, but "" if it is empty or null."""
    if field in row and (row[field] is None or (isinstance(row[field], str) and not row[field].strip())):
        return ""
    return text_of(place, row, field)


def text_of(place: str, row: Mapping[str, Any], field: str) -> str:
    """Return the field as text.

    Raises:
        ValueError: it is missing, empty, neither text nor a number, or text that no tokenizer can take.
    """
    if field not in row:
        raise ValueError(
            f"{place}: no field {field!r}; the fields are {', '.join(map(str, row))}. "
            "Set task.question_field and task.answer_field to two of these, or to the same one without answers"
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
        raise ValueError(f"{place}: {field!r} holds a NUL character; remove it, or find what damaged the file")
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can escape it, but UTF-8 cannot encode it, and no tokenizer takes it
        raise ValueError(
            f"{place}: {field!r} holds half of a surrogate pair, which is not text; write the whole character"
        ) from None
    return text
