"""The gallery: each variant beside the first one, in the metric that tells them apart and in right answers."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes

from grpo_ray.tools.drawing.figures import draw_spread, legend_beside, new_figure, tidy
from grpo_ray.tools.experiments.curves import LEGEND, by_step
from grpo_ray.tools.experiments.table import VariantResult

ANSWER = "reward/answer"
PAIRS_PER_ROW = 2


def plot_gallery(
    telling: Mapping[str, str], results: Sequence[VariantResult], title: str, folder: Path
) -> None:
    """Draw `gallery.png`: two small plots per variant other than the first.

    Args:
        telling: by variant, the metric that shows its difference.
    """
    first, by_label = results[0], {result.label: result for result in results}
    num_rows = -(-len(telling) // PAIRS_PER_ROW)
    figure = new_figure(19, 3.3 * num_rows + 0.6)
    axes = list(figure.subplots(num_rows, 2 * PAIRS_PER_ROW, squeeze=False).flat)
    for axis in axes[2 * len(telling) :]:
        axis.set_visible(False)
    pairs = zip(axes[::2], axes[1::2], strict=True)
    for (label, metric), (left, right) in zip(telling.items(), pairs, strict=False):
        for axis, name in ((left, metric), (right, ANSWER)):
            _plot(axis, first, by_label[label], name)
        left.set_title(label, loc="left", fontsize=13, fontweight="bold")
        right.set_ylim(-0.02, 1.02)
    figure.suptitle(title, fontsize=14)
    legend_beside(figure, LEGEND)
    figure.savefig(folder / "gallery.png")


def _plot(axis: Axes, first: VariantResult, other: VariantResult, metric: str) -> None:
    values: list[float] = []
    for index, (result, label) in enumerate([(first, first.label), (other, "the failure")]):
        points = by_step([outcome.series(metric) for outcome in result.results])
        draw_spread(axis, index, label, points)
        values += [value for _, at_step in points for value in at_step]
    positive = [value for value in values if value > 0]
    if len(positive) == len(values) and positive and max(positive) > 30 * min(positive):
        axis.set_yscale("log")
    tidy(axis, "step", metric)
