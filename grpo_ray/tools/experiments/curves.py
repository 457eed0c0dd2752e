"""Plots over steps and seconds: the validation reward and the experiment's other metrics."""

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from grpo_ray.tools.drawing.figures import Points, draw_spread, legend_beside, new_figure, save, tidy
from grpo_ray.tools.experiments.table import VariantResult
from grpo_ray.watch.metrics_catalog import METRICS

LEGEND = "line: mean of the seeds\nband: ± sample standard deviation"
NUM_COLUMNS = 3


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
    tidy(over_steps, "step", "validation reward (share of responses right)")
    tidy(over_seconds, "seconds of training (without startup)", "")
    over_steps.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.suptitle(title, fontsize=14)
    legend_beside(figure, over_steps, LEGEND)
    save(figure, path)


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
    drawn = (axis for axis in figure.axes if axis.get_legend_handles_labels()[0])
    legend_beside(figure, next(drawn, figure.axes[0]), LEGEND)
    save(figure, path)


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
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))


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
