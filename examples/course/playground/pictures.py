"""The playground's pictures, each of 1200 x 800 pixels."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from matplotlib.axes import Axes
from torch import Tensor

from examples.course.playground.baseline import Estimates
from examples.course.playground.comparison import Run
from examples.course.playground.frozen import LECTURE_W, RATIOS, ascend, gradients
from examples.course.playground.settings import Settings
from grpo_ray.tools.drawing.figures import COLORS, GRID, INK, draw_spread, legend_beside, new_figure, tidy

WIDTH, HEIGHT = 12, 8
BIN_EDGES = [0.5 * index for index in range(-10, 13)]  # means of 10 samples have few values for finer bins
MAX_REFRESHES = 40  # more lines would hide the curves


def plot_runs(
    runs: Sequence[Run], settings: Settings, compare: str | None, best_reward: float, path: Path
) -> None:
    """Plot the expected reward over steps, and below it another quantity that the comparison affects."""
    below, name = {
        "deltas": ("right", "probability of\nthe right response"),
        "loss": ("clip_fraction", "share of tokens\nclipped"),
    }.get(compare or "", ("kl", "KL to reference\n(nats per response)"))
    figure = new_figure(WIDTH, HEIGHT)
    rewards, other = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [3, 2]})
    _draw(rewards, runs, "reward")
    _draw(other, runs, below)
    rewards.axhline(best_reward, color=INK, linewidth=1, linestyle=(0, (2, 3)), label="sorted (the maximum)")
    if below == "kl":
        _mark_refreshes(other, settings)
    else:
        other.set_ylim(-0.03, 1.03)
    tidy(rewards, "", "expected reward of a response")
    tidy(other, f"step (a batch of responses; gradient steps on each: {settings.updates})", name)
    num_seeds = len({run.seed for run in runs})
    figure.suptitle(f"Sorting {settings.numbers} numbers: {_title(settings, compare)}", fontsize=14)
    legend_beside(
        figure,
        f"line: mean of {num_seeds} seed{'s' if num_seeds > 1 else ''}\nband: ± sample standard deviation",
    )
    figure.savefig(path)


def plot_baseline(
    estimates: Mapping[str, Estimates], draws: Mapping[str, Tensor], num_samples: int, path: Path
) -> None:
    """Plot the four deltas, raw and with the baseline, and the spread of their gradient estimates."""
    figure = new_figure(WIDTH, HEIGHT)
    deltas, histogram = figure.subplots(1, 2, width_ratios=[2, 3])
    width = 0.8 / len(estimates)
    for index, (label, estimate) in enumerate(estimates.items()):
        at = [place - 0.4 + (index + 0.5) * width for place in range(4)]
        bars = deltas.bar(at, estimate.deltas.flatten().tolist(), width, color=COLORS[index], label=label)
        deltas.bar_label(bars, fmt="%g", padding=3, fontsize=11)
        histogram.hist(
            draws[label].tolist(), bins=BIN_EDGES, weights=[1 / len(draws[label])] * len(draws[label]),
            color=COLORS[index], alpha=0.6, label=f"{label}: variance of a sample {estimate.variance:.2f}",
        )  # fmt: skip
    mean = next(iter(estimates.values())).mean[0].item()
    histogram.axvline(
        mean, 0, 0.86, color=INK, linewidth=1.5, linestyle="--", label="true gradient: the mean of both"
    )
    deltas.axhline(0, color=INK, linewidth=0.8)
    deltas.set_xticks(range(4), ["s1, a1", "s1, a2", "s2, a1", "s2, a2"])
    stds = " against ".join(f"{estimate.delta_std:.2f}" for estimate in estimates.values())
    deltas.set_title(f"Deltas: standard deviation {stds}", fontsize=12)
    histogram.set_title(f"Gradient by s1's logit of a1: means of {num_samples} samples", fontsize=12)
    histogram.set_ylim(0, 1.2)  # room for the legend
    histogram.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1])
    tidy(deltas, "state, action", "delta")
    tidy(histogram, "estimate of the gradient", "share of the estimates")
    for axis in (deltas, histogram):
        axis.legend(loc="upper right", frameon=False, fontsize=11)
    figure.suptitle("A baseline removes noise and keeps the mean", fontsize=14)
    figure.savefig(path)


def plot_frozen(path: Path) -> None:
    """Plot the three ratios' gradients over w, and gradient ascent on each."""
    figure = new_figure(WIDTH, HEIGHT)
    slopes, ascents = figure.subplots(1, 2)
    w = torch.linspace(-4, 4, 161)
    for index, (label, ratio) in enumerate(RATIOS.items()):
        slopes.plot(w.tolist(), gradients(ratio, w).tolist(), color=COLORS[index], linewidth=2.2, label=label)
        ascents.plot(ascend(ratio), color=COLORS[index], linewidth=2.2)
    slopes.axvline(LECTURE_W, color=GRID, linewidth=1.5, zorder=0)
    slopes.annotate(
        "the lecture's w", (LECTURE_W, 0.97), xycoords=("data", "axes fraction"), xytext=(-6, 0),
        textcoords="offset points", ha="right", va="top", fontsize=11, color=INK,
    )  # fmt: skip
    slopes.set_ylim(-1.15, 1.15)
    ascents.set_ylim(-0.02, 1.02)
    tidy(slopes, "w, where p = sigmoid(w)", "gradient of the ratio by w")
    tidy(ascents, "step of gradient ascent on the ratio", "p, which should rise (its advantage is 1)")
    figure.suptitle("All ratios are 1 at every w: only their gradients differ", fontsize=14)
    handles, labels = slopes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=11)
    figure.savefig(path)


def _draw(axis: Axes, runs: Sequence[Run], name: str) -> None:
    for index, label in enumerate(dict.fromkeys(run.label for run in runs)):
        histories = [run.points for run in runs if run.label == label]
        points = [(at[0].step, [getattr(point, name) for point in at]) for at in zip(*histories, strict=True)]
        draw_spread(axis, index, label, points)


def _mark_refreshes(axis: Axes, settings: Settings) -> None:
    steps = range(settings.reference_every, settings.steps, settings.reference_every)
    if len(steps) > MAX_REFRESHES:
        return
    for step in steps:
        axis.axvline(step, color="#bbbbbb", linewidth=1, linestyle=":", zorder=0)
    axis.annotate(
        "dotted: the policy becomes the reference", (0.99, 0.97), xycoords="axes fraction",
        ha="right", va="top", fontsize=11, color=INK, backgroundcolor="white",
    )  # fmt: skip


def _title(settings: Settings, compare: str | None) -> str:
    fixed = {
        "deltas": f"{settings.deltas} deltas",
        "loss": f"{settings.loss} loss",
        "kl": f"KL penalty {settings.kl:g}",
    }
    return ", ".join(text for name, text in fixed.items() if name != compare and (name != "kl" or settings.kl))
