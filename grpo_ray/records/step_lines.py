"""A log with one line per step, read as a stream: memory holds the place of each line, not its contents."""

import json
import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STEP_FIRST = re.compile(rb'\{"step": (\d+)[,}]')  # as every log here is written

Row = dict[str, Any]


class StepLines:
    """The log's rows by step. A resumed run repeats some steps: the last row of a step counts.

    An incomplete last line is left out, and a file that does not exist has no rows.
    """

    def __init__(self, path: str | Path) -> None:
        """Find the lines.

        Raises:
            ValueError: a line has no step.
        """
        self._path = Path(path)
        self._starts = array("q")
        last: dict[int, int] = {}  # by step: the number of its last line
        if self._path.exists():
            start = 0
            with self._path.open("rb") as file:
                for number, line in enumerate(file):
                    if line.endswith(b"\n"):
                        last[self._step(number, line)] = number
                        self._starts.append(start)
                        start += len(line)
        self.steps = array("q", sorted(last))
        self._numbers = array("q", (last[step] for step in self.steps))

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Row]:
        """Yield the rows in the order of their steps.

        Raises:
            ValueError: a line is not valid JSON.
        """
        if not self.steps:
            return
        with self._path.open("rb") as file:
            for number in self._numbers:
                if file.tell() != self._starts[number]:
                    file.seek(self._starts[number])
                yield self._parsed(number, file.readline())

    def _step(self, number: int, line: bytes) -> int:
        match = STEP_FIRST.match(line)
        step: int = int(match[1]) if match else self._parsed(number, line)["step"]
        return step

    def _parsed(self, number: int, line: bytes) -> Row:
        try:
            row: Row = json.loads(line)
        except ValueError as error:  # not JSON, or not UTF-8
            raise ValueError(
                f"{self._path}, line {number + 1}: not valid JSON ({error}); remove the line"
            ) from None
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise ValueError(f"{self._path}, line {number + 1}: it has no step; remove the line")
        return row
