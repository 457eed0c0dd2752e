"""Cases of a benchmark that take turns, and its results: as a table, as a file, and against other ones."""

import json
import statistics
import time
from collections.abc import Callable, Mapping
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
    def quartiles_s(self) -> tuple[float, float]:
        """Lower and upper quartile of the seconds."""
        if len(self.seconds) == 1:
            return self.seconds[0], self.seconds[0]
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
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


def take_turns(
    cases: Mapping[str, Callable[[], object]], rounds: int, num_warmups: int = 1
) -> dict[str, tuple[float, ...]]:
    """Return each case's seconds in each round; warm-up rounds are left out.

    A drift in the machine's speed affects all of them equally. Every second round has the opposite order, so
    that no case always follows the same one.
    """
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(num_warmups + rounds):
        order = list(cases.items())
        for name, run in order if number % 2 else reversed(order):
            started = time.perf_counter()
            run()
            if number >= num_warmups:
                seconds[name].append(time.perf_counter() - started)
    return {name: tuple(values) for name, values in seconds.items()}


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
            "{:.4g} to {:.4g}".format(*row.quartiles_s),
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


def print_comparison(before: Result, after: Result, console: Console) -> None:
    """Print each case's seconds in both, and their ratio: below 1 the second is faster.

    Raises:
        ValueError: the results are from different benchmarks.
    """
    if before.name != after.name:
        raise ValueError(f"{before.name} and {after.name} are different benchmarks and cannot be compared")
    for warning in differences(before, after):
        console.print(f"! {warning}", style="yellow", markup=False)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("case", no_wrap=True)
    for heading in ("first", "second", "second / first", "spread", "ratio to the baseline", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    others = {row.case: row for row in after.rows}
    for row in before.rows:
        other = others.pop(row.case, None)
        if other is None or not row.seconds or not other.seconds:
            table.add_row(row.case, "", "", "", "", "", "not measured in both")
            continue
        low, high = spread(row, other)
        ratios = [result.ratio(one) for result, one in ((before, row), (after, other))]
        table.add_row(
            row.case,
            f"{row.median_s:.4g} s",
            f"{other.median_s:.4g} s",
            f"{other.median_s / row.median_s:.2f}",
            f"{low:.2f} to {high:.2f}",
            "" if None in ratios else f"{ratios[0]:.2f}, {ratios[1]:.2f}",
            verdict(row, other),
        )
    for case in others:
        table.add_row(case, "", "", "", "", "", "only in the second")
    console.print(table)


def spread(before: Row, after: Row) -> tuple[float, float]:
    """Return the range of the ratio over the middle half of each case's seconds."""
    (before_low, before_high), (after_low, after_high) = before.quartiles_s, after.quartiles_s
    return after_low / before_high, after_high / before_low


def verdict(before: Row, after: Row) -> str:
    low, high = spread(before, after)
    return "faster" if high < 1 else "slower" if low > 1 else "no clear difference"


def differences(before: Result, after: Result) -> list[str]:
    """Return the differences that make two results hard to compare; the load always differs."""
    found = []
    for what in ("machine", "versions", "arguments"):
        first, second = getattr(before, what), getattr(after, what)
        for name in sorted((first.keys() | second.keys()) - {"load_average"}):
            if first.get(name) != second.get(name):
                found.append(
                    f"{what}: {name} is {first.get(name)} in the first, {second.get(name)} in the second"
                )
    return found
