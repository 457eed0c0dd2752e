"""The time breakdown of a step, with one bar per variant."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes

from grpo_ray.tools.drawing.figures import COLORS, GRID, new_figure, save, tidy
from grpo_ray.tools.experiments.outcome import ExperimentOutcome
from grpo_ray.tools.experiments.table import VariantResult
from grpo_ray.watch.metrics_catalog import SYNC

Seconds = Callable[[ExperimentOutcome], float | None]
BAR = 0.8  # fraction of a variant's height


def mean_of(name: str) -> Seconds:
    """Return a metric's mean without the first step, as `ExperimentOutcome.seconds_per_step`."""

    def value(outcome: ExperimentOutcome) -> float | None:
        values = [value for _, value in outcome.series(name)]
        return fmean(values[1:] or values) if values else None

    return value


def weight_sync(outcome: ExperimentOutcome) -> float | None:
    """Return the seconds of all phases of a sync."""
    phases = [mean_of(name)(outcome) for name in ("timing/weight_sync/join_s", *SYNC)]
    known = [phase for phase in phases if phase is not None]
    return sum(known) if known else None


# These overlap: a Generator samples while the Learner trains.
SIDE_BY_SIDE: dict[str, Seconds] = {
    "whole step": mean_of("timing/step_s"),
    "generation (busiest Generator)": mean_of("timing/generate_s"),
    "training": mean_of("timing/train_s"),
    "Learner waits for its batch": mean_of("timing/wait_for_batch_s"),
    "weight sync (all phases)": weight_sync,
}
SIDE_COLORS = ("#999999", COLORS[2], COLORS[0], COLORS[4], COLORS[1])


def plot_timing(results: Sequence[VariantResult], title: str, path: Path) -> None:
    """Draw `timing.png`: the Learner's time, which adds up to the step, and all parts, which overlap."""
    timed = [result for result in results if result.seconds_per_step is not None]
    height = 2.6 + 0.75 * max(2, len(timed))  # inches
    figure = new_figure(15, height)
    learner, all_parts = figure.subplots(1, 2, sharey=True)
    _stack(learner, timed)
    _side_by_side(all_parts, timed)
    learner.set_yticks(range(len(timed)), [result.label for result in timed])
    learner.set_ylim(max(1, len(timed)) - 0.5, -0.5)  # the first variant on top
    learner.set_title("The Learner's time (adds up to the step)", fontsize=12)
    all_parts.set_title("All parts (they overlap and do not add up)", fontsize=12)
    for axis in (learner, all_parts):
        tidy(axis, "seconds per step", "")
        axis.grid(axis="y", visible=False)
        axis.grid(axis="x", color=GRID, linewidth=0.8)
        below = (0.5, -1.1 / height)
        axis.legend(loc="upper center", bbox_to_anchor=below, ncols=2, frameon=False, fontsize=10)
    figure.suptitle(title, fontsize=14)
    save(figure, path)


def _stack(axis: Axes, results: Sequence[VariantResult]) -> None:
    waiting, training = (
        [_mean(result, mean_of(name)) for result in results]
        for name in ("timing/wait_for_batch_s", "timing/train_s")
    )
    steps = [_mean(result, mean_of("timing/step_s")) for result in results]
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


def _side_by_side(axis: Axes, results: Sequence[VariantResult]) -> None:
    height = BAR / len(SIDE_BY_SIDE)
    for place, (label, seconds) in enumerate(SIDE_BY_SIDE.items()):
        at = [index - BAR / 2 + (place + 0.5) * height for index in range(len(results))]
        widths = [_mean(result, seconds) for result in results]
        axis.barh(at, widths, height, color=SIDE_COLORS[place], label=label)


def _mean(result: VariantResult, seconds: Seconds) -> float:
    estimate = result.estimate(seconds)
    return estimate.mean if estimate else 0.0
