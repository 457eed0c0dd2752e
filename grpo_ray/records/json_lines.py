"""Files of one JSON object per line: readable while they grow, and never with half a line in the middle."""

import json
import math
import os
import re
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from types import UnionType
from typing import Any

from grpo_ray.errors import RunError

STEP_FIRST = re.compile(rb'\{"step": (\d+)[,}]')  # as every log here is written
Row = dict[str, Any]
Fields = Mapping[str, type | UnionType]  # by name: the type that a line must have there
STEP: Fields = {"step": int}
MAX_PENDING = 10_000


class JsonLines:
    """Appends lines. A line that cannot be written waits in memory, and is written with the next one."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._pending: deque[bytes] = deque()
        self._has_failed = False
        self._num_dropped = 0
        drop_half_line(self._path)

    def append(self, row: Mapping[str, Any]) -> str | None:
        """Write the row; return why it, or an earlier one, is not on disk yet."""
        self._pending.append((json.dumps(to_json(row), allow_nan=False) + "\n").encode())
        return self.flush()

    def flush(self) -> str | None:
        """Retry the pending lines; return why they are not on disk yet."""
        if not self._pending:
            return None
        try:
            if self._has_failed:  # the failed write may have left half a line
                drop_half_line(self._path)
            self._write_pending()
            self._has_failed = False
        except OSError as error:
            self._has_failed = True
            if len(self._pending) > MAX_PENDING:
                self._pending.popleft()
                self._num_dropped += 1
            dropped = f"; {self._num_dropped} older ones are lost" if self._num_dropped else ""
            return f"{self._path}: {error}; {len(self._pending)} lines wait in memory{dropped}"
        return None

    def _write_pending(self) -> None:
        """Write line by line without a buffer: after an error the file still ends with a whole line."""
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            while self._pending:
                _write_whole(descriptor, self._pending[0])
                self._pending.popleft()
        finally:
            os.close(descriptor)


def _write_whole(descriptor: int, line: bytes) -> None:
    length = os.fstat(descriptor).st_size
    try:
        written = 0
        while written < len(line):  # a disk that fills up accepts only a part
            written += os.write(descriptor, line[written:])
    except OSError:
        os.ftruncate(descriptor, length)
        raise


class DamagedLine(RunError, ValueError):
    """A line that cannot be read, and cannot be half of the last write."""


def parse_line(line: bytes) -> Row | None:
    """Return the line's dict; None if the line is incomplete or damaged, for example full of zeros."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except ValueError:  # not JSON, or not UTF-8
        return None
    return row if isinstance(row, dict) else None


def readable_rows(path: str | Path) -> Iterator[Row]:
    """Yield the dicts of the lines that can be read; the others are left out, and a missing file has none."""
    with suppress(FileNotFoundError), Path(path).open("rb") as file:
        yield from filter(None, map(parse_line, file))


def damaged_line(path: str | Path, offset: int, problem: str = "not valid JSON") -> DamagedLine:
    """Return the error that names the damaged line that begins at an offset."""
    line = f"{path}, line {line_number(path, offset)}"
    return DamagedLine(f"{line}: {problem}; remove the line, or put back a copy of the file")


def _checked(path: str | Path, offset: int, line: bytes, fields: Fields) -> Row:
    """Return the dict of the line at an offset; raises DamagedLine, also if it lacks one of the fields."""
    row = parse_line(line)
    if row is None:
        raise damaged_line(path, offset)
    for name, kind in fields.items():
        if not isinstance(row.get(name), kind):
            raise damaged_line(path, offset, f"it has no {name}")
    return row


def lines_from_end(path: str | Path, block: int = 2**16) -> Iterator[tuple[int, bytes]]:
    """Yield each line's offset and bytes, the last one first; no more of the file is read than is used."""
    with suppress(FileNotFoundError), Path(path).open("rb") as file:
        start = file.seek(0, os.SEEK_END)
        rest = b""  # of the file from `start` on, what is not yielded yet
        while start:
            size = min(block, start)
            start -= size
            file.seek(start)
            rest = file.read(size) + rest
            first = rest.find(b"\n") + 1 if start else 0  # what precedes it may be half of a line
            if start and not first:
                continue
            position = start + len(rest)
            for line in reversed(BytesIO(rest[first:]).readlines()):
                position -= len(line)
                yield position, line
            rest = rest[:first]


def line_number(path: str | Path, offset: int) -> int:
    """Return the number of the line that begins at an offset."""
    number = 1
    if offset:
        with Path(path).open("rb") as file:
            while file.tell() < offset and file.readline():
                number += 1
    return number


def read_lines(path: str | Path, most: int | None = None, fields: Fields | None = None) -> list[Row]:
    """Return the lines as dicts, or the last ones, for which no more of the file is read; none without a file.

    A tail that cannot be read, as a crash leaves it, is left out.

    Raises:
        DamagedLine: another line cannot be read, or any line lacks one of the `fields`.
    """
    rows: list[Row] = []
    for offset, line in lines_from_end(path):
        if rows or parse_line(line) is not None:
            rows.append(_checked(path, offset, line, fields or {}))
        if len(rows) == most:
            break
    return rows[::-1]


def to_json(value: Any) -> Any:
    """Convert to what JSON can hold: nan and infinity to None, tuples to lists, numpy and torch numbers."""
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if value is None or isinstance(value, str | int):
        return value
    number = value if isinstance(value, float) else value.item()
    return number if not isinstance(number, float) or math.isfinite(number) else None


def storable_json(value: Any) -> bytes:
    """Return the value as JSON in UTF-8, with `?` for each lone surrogate in its texts.

    Raises:
        TypeError, ValueError, RecursionError: JSON cannot hold it.
    """
    return json.dumps(value, ensure_ascii=False).encode(errors="replace")


def drop_half_line(path: Path) -> None:
    """Truncate a tail that cannot be read: half a line of a killed run, or the zeros of a power cut.

    A resumed run would append its first line to it.
    """
    end = None
    for offset, line in lines_from_end(path):
        if parse_line(line) is not None:
            break
        end = offset
    if end is not None:
        os.truncate(path, end)


class StepLines:
    """The log's rows by step. A resumed run repeats some steps: the last row of a step counts.

    A tail that cannot be read is left out, and a file that is missing has no rows.
    """

    def __init__(self, path: str | Path) -> None:
        """Find the lines; raises DamagedLine for one without a step, or damaged before the tail."""
        self._path = Path(path)
        starts: dict[int, int] = {}  # by step: where its last line begins
        written = array("q")
        for start, line in lines_from_end(path):
            if line.endswith(b"}\n") and (match := STEP_FIRST.match(line)):
                written.append(int(match[1]))
            elif starts or parse_line(line) is not None:
                written.append(_checked(path, start, line, STEP)["step"])
            else:
                continue
            starts.setdefault(written[-1], start)
        self.written = written[::-1]  # the steps of all lines, in their order
        self.steps = array("q", sorted(starts))
        self._starts = array("q", (starts[step] for step in self.steps))

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Row]:
        """Yield the rows in the order of their steps; raises DamagedLine."""
        if not self.steps:
            return
        with self._path.open("rb") as file:
            for start in self._starts:
                if file.tell() != start:
                    file.seek(start)
                yield _checked(self._path, start, file.readline(), STEP)
