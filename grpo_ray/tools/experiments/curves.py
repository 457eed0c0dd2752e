"""The plots of a comparison: rewards and other metrics over steps and seconds, and the time of a step."""

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

from matplotlib.axes import Axes

from grpo_ray.tools.drawing.figures import COLORS, GRID, Points, draw_spread, legend_beside, new_figure, tidy
from grpo_ray.tools.experiments.outcome import STEP_S
from grpo_ray.tools.experiments.table import VariantResult
from grpo_ray.watch.metrics_catalog import METRICS

LEGEND = "line: mean of the seeds\nband: ± sample standard deviation"
NUM_COLUMNS = 3
BAR = 0.8  # fraction of a variant's height


def plot_validation_reward(results: Sequence[VariantResult], title: str, path: Path) -> None:
    """Draw `validation_reward.png`: over steps on the left, over seconds of training on the right."""
    figure = new_figure(15, 5.8)
    over_steps, over_seconds = figure.subplots(1, 2, sharey=True)
    for index, result in enumerate(results):
        draw_spread(over_steps, index, result.label, _rewards(result), has_markers=True)
        draw_spread(over_seconds, index, result.label, _rewards_over_seconds(result), has_markers=True)
    rewards = [reward for result in results for _, values in _rewards(result) for reward in values]
    if not rewards or (min(rewards) >= 0 and max(rewards) <= 1):
        over_steps.set_ylim(-0.02, 1.02)
    tidy(over_steps, "step", "validation reward")
    tidy(over_seconds, "seconds of training (without startup)", "")
    figure.suptitle(title, fontsize=14)
    legend_beside(figure, LEGEND)
    figure.savefig(path)


def plot_metrics(results: Sequence[VariantResult], metrics: Sequence[str], title: str, path: Path) -> None:
    """Draw `metrics.png`: one small plot per metric."""
    num_columns = min(NUM_COLUMNS, len(metrics))
    num_rows = math.ceil(len(metrics) / num_columns)
    figure = new_figure(4.6 * num_columns + 3, 3.6 * num_rows + 0.6)
    axes = figure.subplots(num_rows, num_columns, squeeze=False).flat
    for axis, metric in zip(axes, metrics, strict=False):
        _plot_metric(axis, results, metric)
    for axis in list(axes)[len(metrics) :]:
        axis.set_visible(False)
    figure.suptitle(title, fontsize=14)
    legend_beside(figure, LEGEND)
    figure.savefig(path)


def _plot_metric(axis: Axes, results: Sequence[VariantResult], metric: str) -> None:
    values: list[float] = []
    for index, result in enumerate(results):
        points = by_step([outcome.series(metric) for outcome in result.results])
        draw_spread(axis, index, result.label, points)
        values += [value for _, at_step in points for value in at_step]
    if not values:
        axis.text(0.5, 0.5, "not in these runs' metrics", ha="center", transform=axis.transAxes)
        axis.set_yticks([])
    elif min(values) > 0 and max(values) > 30 * median(values):
        axis.set_yscale("log")  # one diverging variant must not flatten the others
    unit = METRICS.get(metric, ("", ""))[0]
    tidy(axis, "step", f"{metric} [{unit}]" if unit else metric)


def _rewards(result: VariantResult) -> Points:
    return by_step([outcome.evaluations for outcome in result.results])


def _rewards_over_seconds(result: VariantResult) -> Points:
    """Return the runs' rewards at each evaluated step, placed at the mean of their seconds."""
    timed = [outcome for outcome in result.results if outcome.seconds is not None]
    seconds = by_step([[(step, o.seconds_at(step)) for step, _ in o.evaluations] for o in timed])
    rewards = by_step([outcome.evaluations for outcome in timed])
    return [(fmean(times), values) for (_, times), (_, values) in zip(seconds, rewards, strict=True)]


def by_step(courses: Sequence[Sequence[tuple[int, float]]]) -> Points:
    """Return the values of all runs at each step that any of them has."""
    values: dict[int, list[float]] = defaultdict(list)
    for course in courses:
        for step, value in course:
            values[step].append(value)
    return sorted(values.items())


# The time of a step, with one bar per variant


def plot_timing(results: Sequence[VariantResult], title: str, path: Path) -> None:
    """Draw `timing.png`: what the Learner does in the seconds of a step."""
    timed = [result for result in results if result.seconds_of(STEP_S) is not None]
    height = 2.6 + 0.75 * max(2, len(timed))  # inches
    figure = new_figure(9, height)
    axis = figure.subplots()
    _stack(axis, timed)
    axis.set_yticks(range(len(timed)), [result.label for result in timed])
    axis.set_ylim(max(1, len(timed)) - 0.5, -0.5)  # the first variant on top
    tidy(axis, "seconds per step", "")
    axis.grid(axis="y", visible=False)
    axis.grid(axis="x", color=GRID, linewidth=0.8)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -1.1 / height), ncols=3, frameon=False, fontsize=10)
    figure.suptitle(f"{title}: the Learner's time", fontsize=14)
    figure.savefig(path)


def _stack(axis: Axes, results: Sequence[VariantResult]) -> None:
    waiting, training, steps = (
        [result.seconds_of(name) or 0.0 for result in results]
        for name in ("timing/wait_for_batch_s", "timing/train_s", STEP_S)
    )
    rest = [max(0.0, step - wait - train) for step, wait, train in zip(steps, waiting, training, strict=True)]
    left = [0.0] * len(results)
    parts = (("training", training, COLORS[0]), ("waiting for its batch", waiting, COLORS[4]),
             ("rest (copying weights, checkpoints, ...)", rest, "#c9cdd2"))  # fmt: skip
    for label, widths, color in parts:
        axis.barh(range(len(results)), widths, BAR, left=left, color=color, label=label)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for index, step in enumerate(steps):
        axis.annotate(
            f"{step:.2f}", (left[index], index), xytext=(4, 0), textcoords="offset points", va="center"
        )
    axis.margins(x=0.1)
