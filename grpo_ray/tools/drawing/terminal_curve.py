"""A curve drawn with characters, for terminals."""

import math
from collections.abc import Sequence

import numpy as np

BLOCKS = " ▁▂▃▄▅▆▇█"  # eighths of a character's height


def terminal_curve(
    points: Sequence[tuple[int, float]], title: str = "", width: int = 60, height: int = 10
) -> str:
    """Draw (step, value) points as a filled curve of `height` lines; a label belongs to its line's upper edge.

    1.00 ┤         ▁▅██
         │      ▃▆█████
    0.50 ┤    ▂▇███████
         │▃▅▇██████████
    0.00 └─────────────
          0          40
    """
    points = sorted((step, value) for step, value in points if math.isfinite(value))
    heading = [title] if title else []
    if not points:
        return "\n".join([*heading, "(no points yet)"])
    low, high = _value_range([value for _, value in points])
    values = _columns(points, width)
    eighths = np.rint((values - low) / (high - low) * height * 8).astype(int)
    labels = {
        0: f"{high:.2f}",
        height // 2: f"{high - (high - low) * (height // 2) / height:.2f}",
        height: f"{low:.2f}",
    }
    margin = max(len(label) for label in labels.values())
    lines = []
    for line in range(height):
        filled = np.clip(eighths - (height - 1 - line) * 8, 0, 8)
        blocks = "".join(BLOCKS[eighth] for eighth in filled)
        label = labels.get(line, "")
        lines.append(f"{label:>{margin}} {'┤' if label else '│'}{blocks}".rstrip())
    lines.append(f"{labels[height]:>{margin}} └{'─' * width}")
    first, last = str(points[0][0]), str(points[-1][0])
    ends = first if first == last else f"{first} {last.rjust(width - len(first) - 1)}"
    lines.append(f"{'':>{margin}}  {ends}")
    return "\n".join([*heading, *lines])


def _columns(points: Sequence[tuple[int, float]], width: int) -> np.ndarray:
    """Return one value per column: the mean of its points, or the line between its neighbours. `[width]`"""
    steps, values = (np.array(axis, dtype=float) for axis in zip(*points, strict=True))
    edges = np.linspace(steps[0], steps[-1], width + 1)
    column = np.clip(np.searchsorted(edges, steps, side="right") - 1, 0, width - 1)
    counts = np.bincount(column, minlength=width)
    sums = np.bincount(column, weights=values, minlength=width)
    between = np.interp((edges[:-1] + edges[1:]) / 2, steps, values)
    return np.where(counts > 0, sums / np.maximum(counts, 1), between)


def _value_range(values: Sequence[float]) -> tuple[float, float]:
    """Return 0 to 1 if all values lie within, as rewards usually do; otherwise the values' own range."""
    low, high = min(values), max(values)
    if low >= 0 and high <= 1:
        return 0.0, 1.0
    return (low, high) if high > low else (low - 0.5, high + 0.5)
