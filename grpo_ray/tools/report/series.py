"""A run's metrics for the web page: a bounded number of points, with the known standard errors."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

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
    rows: Sequence[Row], standard_errors: Mapping[str, Mapping[int, float]], max_points: int
) -> Series:
    """Make one point per step, or per bin of consecutive steps.

    A bin's value is the mean over its steps, placed at their middle; for names that end in `/max` it is the
    maximum, so that no peak is lost. Its standard error is that of a mean of independent steps,
    `sqrt(sum(se^2)) / n`.

    Args:
        rows: in the order of their steps, each with a `step`; a value that was not finite is None.
        standard_errors: by metric and step.
        max_points: at least 1.
    """
    bin_size = max(1, math.ceil(len(rows) / max_points))
    bins = [rows[first : first + bin_size] for first in range(0, len(rows), bin_size)]
    names = sorted({name for row in rows for name, value in row.items() if _is_number(value)} - {"step"})
    return Series(
        steps=[(of_bin[0]["step"] + of_bin[-1]["step"]) / 2 for of_bin in bins],
        columns={name: [_value(name, of_bin) for of_bin in bins] for name in names},
        standard_errors={
            name: [_standard_error(errors, of_bin) for of_bin in bins]
            for name, errors in standard_errors.items()
        },
        bin_size=bin_size,
    )


def rounded(value: float) -> float:
    """Round to the digits that the page needs."""
    return float(f"{value:.{DIGITS}g}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _value(name: str, rows: Sequence[Row]) -> float | None:
    values = [row[name] for row in rows if _is_number(row.get(name)) and math.isfinite(row[name])]
    if not values:
        return None
    return rounded(max(values) if name.endswith("/max") else float(np.mean(values)))


def _standard_error(errors: Mapping[int, float], rows: Sequence[Row]) -> float | None:
    """Return the bin's standard error; None unless all of its steps have one."""
    known = [errors[row["step"]] for row in rows if row["step"] in errors]
    return rounded(math.hypot(*known) / len(known)) if len(known) == len(rows) else None
