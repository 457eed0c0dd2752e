"""A run's learning curve: the accuracy of its checkpoints by step."""

import csv
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from grpo_ray.records.durable import replacing
from grpo_ray.records.evaluation_summary import EvaluationSummary, Interval
from grpo_ray.tools.drawing.figures import COLORS, new_figure, save, tidy


def plot_curve(summaries: Sequence[EvaluationSummary], title: str, path: Path) -> None:
    """Draw `accuracy.png`, 1200x800: accuracy, pass@n and format rate by step, with 95% bands."""
    figure = new_figure(12, 8)
    axis = figure.subplots()
    k = str(summaries[0].num_samples)
    steps = [s.step for s in summaries]
    _draw(axis, COLORS[2], "--", "format", steps, [(s.format_reward, s.format_interval) for s in summaries])
    if k != "1":
        passes = [(s.pass_at_k[k], s.pass_at_k_intervals[k]) for s in summaries]
        _draw(axis, COLORS[1], ":", f"pass@{k}", steps, passes)
    _draw(axis, COLORS[0], "-", "accuracy", steps, [(s.accuracy, s.accuracy_interval) for s in summaries])
    for s in summaries:
        axis.annotate(
            f"{s.accuracy:.2f}", (s.step, s.accuracy), textcoords="offset points", xytext=(0, -20),
            ha="center", color=COLORS[0], fontsize=12, fontweight="bold",
            path_effects=[withStroke(linewidth=4, foreground="white")],
        )  # fmt: skip
    axis.set_ylim(-0.06, 1.02)
    tidy(axis, "step", f"share ({summaries[0].num_examples:,} prompts x {k})")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.margins(x=0.04)
    axis.legend(loc="best", framealpha=0.85, edgecolor="none", fontsize=12, title="with 95% bands")
    axis.set_title(title, fontsize=14)
    save(figure, path)


def _draw(
    axis: Axes, color: str, dash: str, label: str, steps: list[int], points: list[tuple[float, Interval]]
) -> None:
    lows, highs = zip(*(interval for _, interval in points), strict=True)
    axis.fill_between(steps, lows, highs, color=color, alpha=0.15, linewidth=0)
    values = [value for value, _ in points]
    axis.plot(steps, values, dash, color=color, linewidth=2.2, marker="o", markersize=6, label=label)


COLUMNS = (
    "step", "accuracy", "accuracy_low", "accuracy_high", "format", "reward", "mean_response_tokens",
    "truncated_frac", "num_errors",
)  # fmt: skip


def write_curve(summaries: Sequence[EvaluationSummary], path: Path) -> None:
    """Write `curve.csv`: one row per checkpoint, with pass@k for each k."""
    ks = list(summaries[0].pass_at_k)
    with replacing(path, fsync=False) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*COLUMNS, *(f"pass@{k}" for k in ks)])
        for s in summaries:
            values = (s.step, s.accuracy, *s.accuracy_interval, s.format_reward, s.reward)
            more = (s.mean_response_tokens, s.truncated_frac, s.num_errors)
            writer.writerow([*values, *more, *(s.pass_at_k[k] for k in ks)])
