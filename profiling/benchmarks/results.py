"""A benchmark's results, as a table and as a file."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Options:
    """Options of a benchmark; `overrides` are for those that train a configuration."""

    rounds: int | None = None  # None: the benchmark's own number
    quick: bool = False  # as small as possible, for a test: its figures mean nothing
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """One case, with its seconds in each round."""

    case: str
    seconds: tuple[float, ...] = ()
    baseline: str | None = None  # the case to compare with
    work: float = 0.0  # number of `unit`s per round; 0: nothing to count
    unit: str = ""
    facts: dict[str, float] = field(default_factory=dict)
    skipped: str = ""  # why it could not be measured here

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def low_s(self) -> float:
        """Lower quartile of the seconds."""
        return _quartiles(self.seconds)[0]

    @property
    def high_s(self) -> float:
        """Upper quartile of the seconds."""
        return _quartiles(self.seconds)[1]


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


@dataclass(frozen=True)
class Result:
    name: str
    time: str
    machine: dict[str, Any]
    versions: dict[str, str]
    arguments: dict[str, Any]
    rows: list[Row]

    def ratio(self, row: Row) -> float | None:
        """To its baseline: the median over rounds, as the two had each round's machine in common."""
        base = next((other for other in self.rows if other.case == row.baseline), None)
        if base is None or not row.seconds or not base.seconds:
            return None
        if len(row.seconds) == len(base.seconds):
            pairs = zip(row.seconds, base.seconds, strict=True)
            return statistics.median(mine / its for mine, its in pairs)
        return row.median_s / base.median_s

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def read_result(path: Path) -> Result:
    """Read a result's file.

    Raises:
        ValueError: the file is not the result of a benchmark.
    """
    try:
        data = json.loads(path.read_text())
        rows = [Row(**{**row, "seconds": tuple(row["seconds"])}) for row in data.pop("rows")]
        return Result(rows=rows, **data)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is not a result that bench.py wrote: {error}") from error


def print_result(result: Result, console: Console) -> None:
    facts = sorted({name for row in result.rows for name in row.facts})
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("case", no_wrap=True)
    for heading in ("seconds", "middle half", "ratio", "per second", *facts):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in result.rows:
        if row.skipped:
            continue
        ratio = result.ratio(row)
        rate = f"{row.work / row.median_s:,.0f} {row.unit}" if row.work else ""
        table.add_row(
            row.case,
            f"{row.median_s:.4g}",
            f"{row.low_s:.4g} to {row.high_s:.4g}",
            "" if ratio is None else f"{ratio:.2f}",
            rate,
            *(f"{row.facts[name]:.4g}" if name in row.facts else "" for name in facts),
        )
    console.print(table)
    for row in result.rows:
        if row.skipped:
            console.print(f"{row.case} is skipped: {row.skipped}", markup=False)
    baselines = sorted({row.baseline for row in result.rows if row.baseline})
    if baselines:
        names = "\n  ".join(baselines)
        console.print(f"ratio: seconds relative to the baseline's in the same rounds; baselines:\n  {names}")
