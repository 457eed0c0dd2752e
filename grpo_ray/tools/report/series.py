"""A run's metrics for the web page: a bounded number of points, with the known standard errors."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import mode
from typing import Any

from grpo_ray.watch.ranks import SLOWEST

Row = Mapping[str, Any]
DIGITS = 5  # significant digits; no chart shows more


@dataclass(frozen=True)
class Series:
    """Columns over steps; if a run has too many steps, each point is a bin of `bin_size` steps."""

    steps: list[float]
    columns: dict[str, list[float | None]]
    standard_errors: dict[str, list[float | None]]
    bin_size: int


def make_series(
    rows: Iterable[Row], num_rows: int, standard_errors: Mapping[str, Mapping[int, float]], max_points: int
) -> Series:
    """Make one point per step, or per bin of consecutive steps.

    A bin's value is the mean over its steps, placed at their middle; for names that end in `/max` it is the
    maximum, so that no peak is lost, and for the slowest rank the number that occurs most often. Its standard
    error is that of a mean of independent steps, `sqrt(sum(se^2)) / n`. Only one bin's rows are in memory at a
    time.

    Args:
        rows: in the order of their steps, each with a `step`; a value that was not finite is None.
        num_rows: their number.
        standard_errors: by metric and step.
        max_points: at least 1.
    """
    bin_size = max(1, math.ceil(num_rows / max_points))
    steps: list[float] = []
    columns: dict[str, list[float | None]] = {}
    errors: dict[str, list[float | None]] = {name: [] for name in standard_errors}
    for place, of_bin in enumerate(_bins(rows, bin_size)):
        steps.append((of_bin[0]["step"] + of_bin[-1]["step"]) / 2)
        for name, values in _numbers(of_bin).items():
            column = columns.setdefault(name, [])
            column += [None] * (place - len(column))
            column.append(_value(name, values))
        for name, column in errors.items():
            column.append(_standard_error(standard_errors[name], of_bin))
    for column in columns.values():
        column += [None] * (len(steps) - len(column))
    return Series(steps, dict(sorted(columns.items())), errors, bin_size)


def _bins(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    rows = iter(rows)
    while of_bin := list(islice(rows, size)):
        yield of_bin


def _numbers(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Return the numbers of each metric."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                found[name].append(value)
    found.pop("step", None)
    return found


def rounded(value: float) -> float:
    """Round to the digits that the page needs."""
    return float(f"{value:.{DIGITS}g}")


def _value(name: str, numbers: Sequence[float]) -> float | None:
    values = [value for value in numbers if math.isfinite(value)]
    if not values:
        return None
    if name == SLOWEST:
        return mode(values)
    return rounded(max(values) if name.endswith("/max") else math.fsum(values) / len(values))


def _standard_error(errors: Mapping[int, float], rows: Sequence[Row]) -> float | None:
    """Return the bin's standard error; None unless all of its steps have one."""
    known = [errors[row["step"]] for row in rows if row["step"] in errors]
    return rounded(math.hypot(*known) / len(known)) if len(known) == len(rows) else None
