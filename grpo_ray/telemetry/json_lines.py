"""Files of one JSON object per line: readable while they grow, and never with half a line in the middle."""

import json
import math
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
        if len(self._pending) > MAX_PENDING:
            self._pending.popleft()
            self._num_dropped += 1
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


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """Return the lines as dicts; an incomplete last line is left out.

    Raises:
        ValueError: another line is not valid JSON.
    """
    return [row for _, row in lines_and_rows(path)]


def read_last_lines(path: str | Path, num_lines: int, max_bytes: int = 2**18) -> list[dict[str, Any]]:
    """Return the last lines as dicts, reading no more than the file's last `max_bytes`.

    Raises:
        ValueError: one of them is not valid JSON.
    """
    with Path(path).open("rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - max_bytes)
        file.seek(start)
        whole, _, _ = file.read(max_bytes).rpartition(b"\n")
    lines = whole.split(b"\n")[1 if start else 0 :]  # the first may be truncated
    try:
        return [json.loads(line) for line in lines[-num_lines:] if line]
    except ValueError as error:
        raise ValueError(f"{path}: one of its last {num_lines} lines is not valid JSON ({error})") from None


def lines_and_rows(path: str | Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Return each line's bytes and dict, as `read_lines`."""
    rows = []
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                rows.append((line, json.loads(line)))
            except ValueError as error:  # not JSON, or not UTF-8
                raise ValueError(f"{path}, line {number}: not valid JSON ({error}); remove the line") from None
    return rows


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


def drop_half_line(path: Path) -> None:
    """Truncate half a line that a killed run left: a resumed run would append its first line to it."""
    if not path.exists():
        return
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(data.rfind(b"\n") + 1)
