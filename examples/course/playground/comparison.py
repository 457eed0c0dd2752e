"""A comparison of one setting's values; all use the same seeds, so that differences are paired."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from examples.course.playground.policy_gradient import Point, train_model
from examples.course.playground.settings import COMPARISONS, Settings
from examples.course.playground.task import SortingTask

TIE = 0.01  # points of reward; below it, both policies are nearly certain of responses with the same reward


@dataclass(frozen=True)
class Run:
    """One training run: its setting, its seed, and the policy after each step."""

    label: str
    seed: int
    points: Sequence[Point]


@dataclass(frozen=True)
class Difference:
    """The difference of the final expected reward to that of the first label, seed by seed."""

    mean: float
    sd: float | None
    """Sample standard deviation over the seeds; None: one seed."""
    num_above: int
    """Number of seeds that are better by more than `TIE`."""
    num_below: int
    """Number of seeds that are worse by more than `TIE`."""
    num_seeds: int


@dataclass(frozen=True)
class Row:
    """The final state of a label's runs."""

    label: str
    num_seeds: int
    reward: float
    """Expected reward, mean over the seeds."""
    reward_sd: float | None
    """Sample standard deviation over the seeds; None: one seed."""
    right: float
    """Probability of the sorted prompt, mean over the seeds."""
    to_first: Difference | None
    """None for the first label, or without a seed in common with it."""


def variants(settings: Settings, compare: str | None) -> dict[str, Settings]:
    """Return the settings to train, by label; without a comparison there is only one."""
    if compare is None:
        return {f"{settings.deltas}, {settings.loss}": settings}
    return {
        f"kl {value}" if compare == "kl" else str(value): settings.model_copy(update={compare: value})
        for value in COMPARISONS[compare]
    }


def train_all(tried: Mapping[str, Settings], task: SortingTask, num_seeds: int) -> Iterator[Run]:
    """Train all settings seed by seed, so that the runs before an interruption can be compared."""
    for seed in range(num_seeds):
        for label, settings in tried.items():
            yield Run(label, seed, train_model(settings, task, seed))


def summarize(runs: Sequence[Run]) -> list[Row]:
    """Make one row per label, in the order of their first runs."""
    labels = list(dict.fromkeys(run.label for run in runs))
    return [_row(runs, label, labels[0]) for label in labels]


def table(rows: Sequence[Row]) -> str:
    """Write the rows as a table in text."""
    width = max(len(row.label) for row in rows)
    lines = [
        f"{'':<{width}}  {'reward':>13}  {'right':>5}" + (f"  against {rows[0].label}" if rows[1:] else "")
    ]
    for row in rows:
        line = f"{row.label:<{width}}  {_spread(row.reward, row.reward_sd):>13}  {row.right:>5.0%}"
        lines.append(f"{line}  {_in_words(row.to_first)}" if row.to_first else line)
    return "\n".join(lines)


def _row(runs: Sequence[Run], label: str, first: str) -> Row:
    ends = [run.points[-1] for run in runs if run.label == label]
    rewards = [end.reward for end in ends]
    to_first = _difference(runs, label, first) if label != first else None
    return Row(label, len(ends), fmean(rewards), _sd(rewards), fmean(end.right for end in ends), to_first)


def _difference(runs: Sequence[Run], label: str, first: str) -> Difference | None:
    final = {(run.label, run.seed): run.points[-1].reward for run in runs}
    seeds = {run.seed for run in runs if {(label, run.seed), (first, run.seed)} <= final.keys()}
    if not seeds:
        return None
    differences = [final[label, seed] - final[first, seed] for seed in seeds]
    above, below = (sum(sign * difference > TIE for difference in differences) for sign in (1, -1))
    return Difference(fmean(differences), _sd(differences), above, below, len(differences))


def _in_words(difference: Difference) -> str:
    return (
        f"{_spread(difference.mean, difference.sd, '+')}: above in {difference.num_above} of "
        f"{difference.num_seeds} seeds, below in {difference.num_below}"
    )


def _sd(values: Sequence[float]) -> float | None:
    return stdev(values) if len(values) > 1 else None


def _spread(mean: float, sd: float | None, sign: str = "") -> str:
    return f"{mean:{sign}.2f}" + (f" ± {sd:.2f}" if sd is not None else "")
