"""The comparison in numbers: one row per variant as CSV and as Markdown, and sentences made of them."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, stdev
from typing import Any

from grpo_ray.errors import counted
from grpo_ray.tools.experiments.experiment import Experiment
from grpo_ray.tools.experiments.outcome import STEP_S, ExperimentOutcome

THRESHOLDS = (0.5, 0.8)


@dataclass(frozen=True)
class Estimate:
    """Statistics of a value over the runs that have one."""

    mean: float
    sd: float | None  # sample standard deviation; None for a single run
    num_runs: int


@dataclass(frozen=True)
class VariantResult:
    """One variant's runs. Failed ones are counted and left out of every estimate."""

    label: str
    outcomes: Sequence[ExperimentOutcome]

    @property
    def results(self) -> list[ExperimentOutcome]:
        return [outcome for outcome in self.outcomes if outcome.is_over]

    def estimate(self, value: Callable[[ExperimentOutcome], float | None]) -> Estimate | None:
        values = [found for outcome in self.results if (found := value(outcome)) is not None]
        if not values:
            return None
        sd = stdev(values) if len(values) > 1 else None
        return Estimate(fmean(values), sd, len(values))

    def mean(self, value: Callable[[ExperimentOutcome], float | None]) -> float | None:
        estimate = self.estimate(value)
        return estimate.mean if estimate else None

    @property
    def final(self) -> Estimate | None:
        return self.estimate(lambda outcome: outcome.final)

    def seconds_of(self, metric: str) -> float | None:
        return self.mean(lambda outcome: outcome.seconds_of(metric))

    def last_quarter(self, metric: str) -> float | None:
        return self.mean(lambda outcome: outcome.last_quarter(metric))


def by_variant(labels: Iterable[str], outcomes: Sequence[ExperimentOutcome]) -> list[VariantResult]:
    return [VariantResult(label, [o for o in outcomes if o.variant == label]) for label in labels]


def csv_row(result: VariantResult, metrics: Sequence[str]) -> dict[str, Any]:
    """Return the variant's row of `table.csv`: plain numbers, and None where there is none."""
    final = result.final
    row: dict[str, Any] = {
        "variant": result.label,
        "runs": len(result.results),
        "final_reward_mean": final.mean if final else None,
        "final_reward_sd": final.sd if final else None,
        "best_reward_mean": result.mean(lambda outcome: outcome.best),
        "half_reward_mean": result.mean(lambda outcome: outcome.reward_at(outcome.num_steps / 2)),
    }
    for threshold in THRESHOLDS:
        reached = result.estimate(partial(ExperimentOutcome.steps_to, reward=threshold))
        row[f"steps_to_{threshold}_mean"] = reached.mean if reached else None
        row[f"steps_to_{threshold}_runs"] = reached.num_runs if reached else 0
    row["seconds_total_mean"] = result.mean(lambda outcome: outcome.seconds)
    row["seconds_per_step_mean"] = result.seconds_of(STEP_S)
    row["lag_max"] = max((lag for o in result.results for _, lag in o.series("lag/max")), default=None)
    row |= {f"{metric}_last_quarter_mean": result.last_quarter(metric) for metric in metrics}
    row["warnings"] = _warnings(result)
    row["diverged"] = sum(outcome.status == "diverged" for outcome in result.outcomes)
    row["failed"] = len(result.outcomes) - len(result.results)
    return row


def comparison_table(results: Sequence[VariantResult], metrics: Sequence[str]) -> str:
    headings = ["variant", "final validation reward", "best", "at half the steps"]
    headings += [f"steps to {threshold}" for threshold in THRESHOLDS]
    headings += ["seconds", "seconds per step", *metrics]
    headings += ["largest lag"] * ("lag/max" not in metrics) + ["warnings", "diverged", "failed"]
    lines = [headings, ["---"] + ["---:"] * (len(headings) - 1)]
    lines += [_markdown_row(result, metrics) for result in results]
    notes = (
        "Mean ± sample standard deviation over the runs (seeds). Steps to a reward: the first validation that "
        "reached it, and the number of runs that did, if not all. Metrics: mean over the last quarter of the "
        "steps (lag/max: the largest). Seconds: total of timed steps, without startup; seconds per step: mean "
        "without the first step. Warnings: the detectors that see a failure (docs/failures.md), and the first "
        "step at which each does, run by run."
    )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + f"\n\n{notes}\n"


def _markdown_row(result: VariantResult, metrics: Sequence[str]) -> list[str]:
    row = csv_row(result, metrics)
    cells = [result.label, spread(result.final)]
    rewards = (row[name] for name in ("best_reward_mean", "half_reward_mean"))
    cells += ["–" if reward is None else f"{reward:.3f}" for reward in rewards]
    cells += [_steps_cell(row, threshold) for threshold in THRESHOLDS]
    cells += [short(row["seconds_total_mean"]), short(row["seconds_per_step_mean"])]
    lag = short(row["lag_max"])
    cells += [lag if metric == "lag/max" else short(row[f"{metric}_last_quarter_mean"]) for metric in metrics]
    cells += [lag] * ("lag/max" not in metrics)
    return [*cells, *(str(row[name]) for name in ("warnings", "diverged", "failed"))]


def _warnings(result: VariantResult) -> str:
    """Return the detectors that warn in any run, with the first step at which each does, run by run."""
    steps: dict[str, list[int]] = defaultdict(list)
    for outcome in result.results:
        for name, step in outcome.detected.items():
            steps[name].append(step)
    num_runs = len(result.results)
    found = []
    for name, at in sorted(steps.items()):
        share = "" if len(at) == num_runs else f" ({len(at)} of {num_runs} runs)"
        found.append(f"{name} at {', '.join(map(str, at))}{share}")
    return "; ".join(found) or "none"


def _steps_cell(row: Mapping[str, Any], threshold: float) -> str:
    mean, num_reached = row[f"steps_to_{threshold}_mean"], row[f"steps_to_{threshold}_runs"]
    if mean is None:
        return "never" if row["runs"] else "–"
    return short(mean) + ("" if num_reached == row["runs"] else f" ({num_reached} of {row['runs']})")


def spread(estimate: Estimate | None) -> str:
    """Return the estimate as `0.912 ± 0.013`."""
    if estimate is None:
        return "–"
    return f"{estimate.mean:.3f}" + (f" ± {estimate.sd:.3f}" if estimate.sd is not None else "")


def short(value: float | None) -> str:
    """Return three significant digits, without an exponent if that is readable; integers as they are."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == round(value) or abs(value) >= 100:
        return f"{value:.0f}" if abs(value) < 1e6 else f"{value:.3g}"
    return f"{value:.3g}" if abs(value) < 1e-3 else f"{value:.{2 - math.floor(math.log10(abs(value)))}f}"


def write_summary(
    experiment: Experiment, results: Sequence[VariantResult], command: str, machine: str, jobs: int
) -> str:
    """Return `summary.md`: rewards, differences from the first variant, seconds, and problems."""
    problem = f" (handout, problem {experiment.problem})" if experiment.problem else ""
    heading = f"# {experiment.name}\n\n{experiment.title}{problem}"
    sections = [heading, comparison_table(results, experiment.metrics)]
    for title, lines in (
        ("Rewards", list(_rewards(results))),
        ("Seconds", list(_seconds(results, jobs))),
        ("Problems", list(_problems(results, experiment.metrics))),
    ):
        if lines:
            sections.append(f"## {title}\n\n" + "\n".join(f"- {line}" for line in lines))
    sections.append(f"## Generated by\n\n    {command}\n\non {machine}")
    return "\n\n".join(section.strip() for section in sections) + "\n"


def _rewards(results: Sequence[VariantResult]) -> Iterator[str]:
    first = results[0]
    for result in results:
        if result.final is None:
            yield f"**{result.label}**: no result"
            continue
        runs = counted(result.final.num_runs, "run")
        difference = ""
        if result is not first and first.final is not None:
            difference = f"; {difference_in_words(first.final, result.final)} {first.label}"
        yield f"**{result.label}**: final validation reward {spread(result.final)} ({runs}){difference}"
    finals = [result.final for result in results if result.final is not None and result.final.sd is not None]
    if len(finals) > 1 and first.final is not None and first.final.sd is not None:
        yield (
            "Within the spread: the means differ by no more than sqrt(sd² + sd²) of the two variants' standard "
            "deviations over seeds. This is not a significance test"
        )


def difference_in_words(first: Estimate, other: Estimate) -> str:
    """Return `+0.040, more than the spread (0.012), against`, which the first variant's name follows."""
    difference = other.mean - first.mean
    if first.sd is None or other.sd is None:
        return f"{difference:+.3f} (one run: the spread is unknown) against"
    allowed = math.hypot(first.sd, other.sd)
    relation = "within" if abs(difference) <= allowed else "more than"
    return f"{difference:+.3f}, {relation} the spread ({allowed:.3f}), against"


def _seconds(results: Sequence[VariantResult], jobs: int) -> Iterator[str]:
    first = results[0].seconds_of(STEP_S)
    for result in results:
        seconds = result.seconds_of(STEP_S)
        if seconds is None:
            continue
        ratio = ""
        if result is not results[0] and first is not None:
            ratio = f", {short(seconds / first)} times {results[0].label}'s"
        yield f"**{result.label}**: {short(seconds)} s per step{ratio}"
    if jobs > 1:
        yield f"{jobs} parallel runs shared the machine: compare seconds with care"


def _problems(results: Sequence[VariantResult], metrics: Sequence[str]) -> Iterator[str]:
    for result in results:
        for outcome in result.outcomes:
            if outcome.status != "finished":
                reason = f": {outcome.reason}" if outcome.reason else ""
                yield f"{result.label}, seed {outcome.seed}: {outcome.status}{reason}"
    missing = [m for m in metrics if all(result.last_quarter(m) is None for result in results)]
    if missing:
        yield f"in no run's metrics: {', '.join(missing)}"
