"""A run's metrics for the web page: a bounded number of points, stages of actors, and totals of ranks."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import mode
from typing import Any

from grpo_ray.watch.metrics_catalog import COLLECTIVES, SLOWEST, STAGE, by_number, rank_name

Row = Mapping[str, Any]
DIGITS = 5  # significant digits; no chart shows more
Stages = dict[str, list[float]]
MEMORY = re.compile(r"memory/(?P<actor>learner-\d+)_(?P<kind>device_peak_)?bytes")


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


def stage_times(columns: Mapping[str, Sequence[float | None]]) -> dict[str, Stages]:
    """Return seconds per step, by actor and stage; an actor's stages add up to its time, 0 where unknown."""
    actors: dict[str, Stages] = defaultdict(dict)
    for name, column in columns.items():
        if match := STAGE.fullmatch(name):
            actors[match["actor"]][match["stage"]] = [value or 0.0 for value in column]
    return dict(sorted(actors.items(), key=lambda item: by_number(item[0])))


class RankTotals:
    """Each rank's time in collectives, the steps in which it was the slowest, and its memory."""

    def __init__(self) -> None:
        self._num_steps: Counter[str] = Counter()  # by rank, like the next two; only steps with its seconds
        self._collectives_s: dict[str, float] = defaultdict(float)
        self._step_s: dict[str, float] = defaultdict(float)
        self._num_slowest: Counter[str] = Counter()
        self._memory: dict[tuple[str, bool], float] = {}  # the most, by rank; True: of its device

    def noted(self, row: Row) -> Row:
        """Note a step, and return its row."""
        for name, value in row.items():
            if value is None:  # it was not finite
                continue
            if rank := COLLECTIVES.fullmatch(name):
                self._num_steps[rank["actor"]] += 1
                self._collectives_s[rank["actor"]] += value
                self._step_s[rank["actor"]] += row.get("timing/step_s") or 0.0
            elif memory := MEMORY.fullmatch(name):
                of = memory["actor"], memory["kind"] is not None
                self._memory[of] = max(value, self._memory.get(of, 0.0))
        if (number := row.get(SLOWEST)) is not None:
            self._num_slowest[rank_name(number)] += 1
        return row

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per rank; empty for a run with one rank.

        `collectives_frac` is the share of the steps' time, `slowest_frac` that of the steps in which the rank
        was the slowest; None stands for values that were not measured.
        """
        return [self._row(name) for name in sorted(self._num_steps, key=by_number)]

    def _row(self, name: str) -> dict[str, Any]:
        seconds, whole, num_steps = self._collectives_s[name], self._step_s[name], self._num_steps[name]
        return {
            "name": name,
            "collectives_s": seconds / num_steps,
            "collectives_frac": seconds / whole if whole else None,
            "slowest_frac": self._num_slowest[name] / num_steps,
            "process_bytes": self._memory.get((name, False)),
            "device_bytes": self._memory.get((name, True)),
        }
