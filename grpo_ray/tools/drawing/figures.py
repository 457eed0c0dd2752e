"""The common style of all figures (colours, lines, bands, legends and axes), and a run's reward curve."""

from collections.abc import Sequence
from io import BytesIO
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from grpo_ray.records.json_lines import StepLines

INK, GRID = "#333333", "#e3e3e3"
# Okabe and Ito's palette, which colour-blind readers can distinguish, without its yellow (unreadable on white).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", ":")
MARKERS = "osD^vP*X<>hd"
STYLES = [(color, dash) for dash, color in product(DASHES, COLORS)]
TRAINING, VALIDATION = "#9bbbd8", "#c0392b"
TIMES = ("timing/wait_for_batch_s", "timing/train_s", "timing/step_s")
DRAWN = ("step", "reward/mean", *TIMES)
TIME_COLORS = {"waiting for a batch": "#e8c07d", "training": "#5b8db8", "rest": "#c9cdd2"}

Points = Sequence[tuple[float, Sequence[float]]]  # x, and the values of all runs at x


class _Picture(Figure):
    def _repr_png_(self) -> bytes:  # for notebooks, which otherwise show figures of pyplot alone
        self.savefig(file := BytesIO())
        return file.getvalue()


def new_figure(width: float, height: float) -> Figure:
    """Make a figure of `width` x `height` hundred pixels."""
    # Drawn without pyplot, which keeps every figure alive and picks a backend for the whole process.
    figure = _Picture(figsize=(width, height), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw_spread(axis: Axes, index: int, label: str, points: Points, has_markers: bool = False) -> None:
    """Draw the mean over runs as a line, and one sample standard deviation on either side as a band."""
    if not points:
        return
    color, dash = STYLES[index % len(STYLES)]
    x, means = [at for at, _ in points], [fmean(values) for _, values in points]
    deviations = [stdev(values) if len(values) > 1 else 0.0 for _, values in points]
    low, high = ([m + sign * d for m, d in zip(means, deviations, strict=True)] for sign in (-1, 1))
    axis.fill_between(x, low, high, color=color, alpha=0.13, linewidth=0)
    axis.plot(
        x, means, dash, color=color, label=label, linewidth=2,
        marker=MARKERS[index % len(MARKERS)] if has_markers else None, markersize=6,
    )  # fmt: skip


def legend_beside(figure: Figure, title: str) -> None:
    """Put a legend of all axes, each label once, to the right of them."""
    of_axes = (zip(*axis.get_legend_handles_labels(), strict=True) for axis in figure.axes)
    found = {label: line for drawn in of_axes for line, label in drawn}
    if found:
        figure.legend(
            list(found.values()), list(found), loc="outside right upper", frameon=False, fontsize=11,
            title=title, alignment="left", handlelength=3,
        )  # fmt: skip


def tidy(axis: Axes, x_label: str, y_label: str) -> None:
    """Label the axes, steps with whole numbers, and reduce frame and grid to what helps reading."""
    if x_label.startswith("step"):
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_xlabel(x_label, fontsize=12, color=INK)
    axis.set_ylabel(y_label, fontsize=12, color=INK)
    axis.grid(axis="y", color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(INK)
    axis.tick_params(colors=INK, labelsize=11)


def draw_reward_curve(metrics_path: str | Path, evaluations_summary_path: str | Path) -> Figure:
    """Draw 1200x800 pixels from `metrics.jsonl` and `evaluations/summary.jsonl`; either may not exist yet."""
    # A line has hundreds of metrics, and a run 100,000 lines.
    metrics = [{name: row.get(name) for name in DRAWN} for row in StepLines(metrics_path)]
    evaluations = list(StepLines(evaluations_summary_path))
    timed = [row for row in metrics if row.get("timing/step_s") is not None]
    figure = new_figure(12, 8)
    ratios = {"height_ratios": [3, 1] if timed else [1]}
    axes = figure.subplots(1 + bool(timed), 1, sharex=True, squeeze=False, gridspec_kw=ratios)[:, 0]
    _plot_rewards(axes[0], metrics, evaluations)
    if timed:
        _plot_times(axes[1], timed)
    for axis in axes:
        tidy(axis, "step" if axis is axes[-1] else "", axis.get_ylabel())
        axis.margins(x=0.02)
    return figure


def _plot_rewards(axis: Axes, metrics: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]]) -> None:
    steps, rewards = _series(metrics, "reward/mean")
    axis.plot(steps, rewards, color=TRAINING, linewidth=1.3, label="training, each step")
    evaluated, validation = _series(evaluations, "reward")
    errors = np.array(
        [row.get("reward_standard_error") or 0.0 for row in evaluations if row["reward"] is not None]
    )
    axis.fill_between(
        evaluated, validation - errors, validation + errors, color=VALIDATION, alpha=0.15, linewidth=0
    )
    label = "validation, ± one standard error"
    axis.plot(evaluated, validation, color=VALIDATION, linewidth=2.4, marker="o", markersize=5, label=label)
    everything = np.concatenate([rewards, validation])
    if everything.size == 0 or (everything.min() >= 0 and everything.max() <= 1):
        axis.set_ylim(0, 1)
    if evaluated.size:
        _label_ends(axis, evaluated, validation)
    axis.set_ylabel("mean reward")
    axis.legend(loc="best", frameon=True, framealpha=0.85, edgecolor="none", fontsize=12)


def _label_ends(axis: Axes, steps: np.ndarray, values: np.ndarray) -> None:
    """Write the first and the last validation reward, which readers look for."""
    bottom, top = axis.get_ylim()
    for index, side in {0: "left", len(steps) - 1: "right"}.items():
        is_high = values[index] > bottom + 0.9 * (top - bottom)  # keep the numbers inside the frame
        axis.annotate(
            f"{values[index]:.2f}", (steps[index], values[index]), ha=side,
            textcoords="offset points", xytext=(0, -26 if is_high else 14),
            color=VALIDATION, fontsize=14, fontweight="bold",
            path_effects=[withStroke(linewidth=4, foreground="white")],
        )  # fmt: skip


def _plot_times(axis: Axes, metrics: Sequence[dict[str, Any]]) -> None:
    """Stack the seconds of each step: waiting, training, and the rest."""
    steps = np.array([row["step"] for row in metrics])
    waiting, training, total = (
        np.array([row.get(name) or 0.0 for row in metrics], dtype=float) for name in TIMES
    )
    rest = np.maximum(0.0, total - waiting - training)
    axis.stackplot(
        steps, waiting, training, rest, labels=list(TIME_COLORS), colors=list(TIME_COLORS.values()),
        step="mid", linewidth=0,
    )  # fmt: skip
    tops = waiting + training + rest
    # One long step, such as the first, must not flatten all the others; the legend needs room above.
    limit = 1.5 * float(np.percentile(tops, 95)) or 1.0
    axis.set_ylim(0, limit)
    longest = int(tops.argmax())
    if tops[longest] > limit:
        axis.annotate(
            f"step {steps[longest]}: {tops[longest]:.1f} s", (steps[longest], limit),
            textcoords="offset points", xytext=(8, -14), fontsize=11, color=INK,
        )  # fmt: skip
    axis.set_ylabel("seconds per step")
    axis.legend(loc="upper right", ncols=3, frameon=True, framealpha=0.85, edgecolor="none", fontsize=11)


def _series(rows: Sequence[dict[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return steps and values without the missing ones (a value that was not finite is null)."""
    pairs = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return np.array([step for step, _ in pairs]), np.array([value for _, value in pairs], dtype=float)
