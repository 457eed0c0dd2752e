"""The common style of all figures: colours, lines, bands, legends and axes."""

from collections.abc import Sequence
from itertools import product
from statistics import fmean, stdev

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

INK, GRID = "#333333", "#e3e3e3"
# Okabe and Ito's palette, which colour-blind readers can distinguish, without its yellow (unreadable on white).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", ":")
MARKERS = "osD^vP*X<>hd"
STYLES = [(color, dash) for dash, color in product(DASHES, COLORS)]

Points = Sequence[tuple[float, Sequence[float]]]  # x, and the values of all runs at x


def new_figure(width: float, height: float) -> Figure:
    """Make a figure of `width` x `height` hundred pixels."""
    # Drawn without pyplot, which keeps every figure alive and picks a backend for the whole process.
    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
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


def legend_beside(figure: Figure, axis: Axes, title: str) -> None:
    """Put the axis's legend to the right of the axes."""
    handles, labels = axis.get_legend_handles_labels()
    if handles:
        figure.legend(
            handles, labels, loc="outside right upper", frameon=False, fontsize=11, title=title,
            alignment="left", handlelength=3,
        )  # fmt: skip


def tidy(axis: Axes, x_label: str, y_label: str) -> None:
    """Label the axes, and reduce frame and grid to what helps reading."""
    axis.set_xlabel(x_label, fontsize=12, color=INK)
    axis.set_ylabel(y_label, fontsize=12, color=INK)
    axis.grid(axis="y", color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(INK)
    axis.tick_params(colors=INK, labelsize=11)
