"""Compare two results of one benchmark."""

from rich.console import Console
from rich.table import Table

from benchmarks.results import Result, Row


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
        table.add_row(
            row.case,
            f"{row.median_s:.4g} s",
            f"{other.median_s:.4g} s",
            f"{other.median_s / row.median_s:.2f}",
            f"{low:.2f} to {high:.2f}",
            _baselines(before.ratio(row), after.ratio(other)),
            verdict(row, other),
        )
    for case in others:
        table.add_row(case, "", "", "", "", "", "only in the second")
    console.print(table)


def spread(before: Row, after: Row) -> tuple[float, float]:
    """Return the range of the ratio over the middle half of each case's seconds."""
    return after.low_s / before.high_s, after.high_s / before.low_s


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


def _baselines(before: float | None, after: float | None) -> str:
    return "" if before is None or after is None else f"{before:.2f}, {after:.2f}"
