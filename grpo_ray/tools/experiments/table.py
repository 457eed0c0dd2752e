"""The comparison in numbers: one row per variant, as CSV and as Markdown."""

import csv
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from grpo_ray.records.durable import replacing
from grpo_ray.tools.experiments.outcome import ExperimentOutcome

THRESHOLDS = (0.5, 0.8)


@dataclass(frozen=True)
class Estimate:
    """Statistics of a value over the runs that have one."""

    mean: float
    sd: float | None  # sample standard deviation; None for a single run
    num_runs: int
    low: float
    high: float


@dataclass(frozen=True)
class VariantResult:
    """One variant's runs. Failed ones are counted and left out of every estimate."""

    label: str
    outcomes: Sequence[ExperimentOutcome]

    @property
    def results(self) -> list[ExperimentOutcome]:
        return [outcome for outcome in self.outcomes if outcome.is_over]

    def count(self, status: str) -> int:
        return sum(outcome.status == status for outcome in self.outcomes)

    def estimate(self, value: Callable[[ExperimentOutcome], float | None]) -> Estimate | None:
        values = [found for outcome in self.results if (found := value(outcome)) is not None]
        if not values:
            return None
        sd = stdev(values) if len(values) > 1 else None
        return Estimate(fmean(values), sd, len(values), min(values), max(values))

    @property
    def final(self) -> Estimate | None:
        return self.estimate(lambda outcome: outcome.final)

    @property
    def seconds_per_step(self) -> Estimate | None:
        return self.estimate(lambda outcome: outcome.seconds_per_step)

    def last_quarter(self, metric: str) -> Estimate | None:
        return self.estimate(lambda outcome: outcome.last_quarter(metric))

    @property
    def largest_lag(self) -> float | None:
        estimate = self.estimate(lambda outcome: outcome.largest("lag/max"))
        return estimate.high if estimate else None


def by_variant(labels: Iterable[str], outcomes: Sequence[ExperimentOutcome]) -> list[VariantResult]:
    return [VariantResult(label, [o for o in outcomes if o.variant == label]) for label in labels]


# ---- CSV: plain numbers; empty where there is none ----


def write_csv(path: Path, results: Sequence[VariantResult], metrics: Sequence[str]) -> None:
    rows = [_csv_row(result, metrics) for result in results]
    with replacing(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _csv_row(result: VariantResult, metrics: Sequence[str]) -> dict[str, str | float | int | None]:
    final = result.final
    row: dict[str, str | float | int | None] = {
        "variant": result.label,
        "runs": len(result.results),
        "final_reward_mean": final.mean if final else None,
        "final_reward_sd": final.sd if final else None,
        "best_reward_mean": _mean(result.estimate(lambda outcome: outcome.best)),
        "half_reward_mean": _mean(result.estimate(_half)),
    }
    for threshold in THRESHOLDS:
        reached = _steps_to(result, threshold)
        row[f"steps_to_{threshold}_mean"] = _mean(reached)
        row[f"steps_to_{threshold}_runs"] = reached.num_runs if reached else 0
    row["seconds_total_mean"] = _mean(result.estimate(lambda outcome: outcome.seconds))
    row["seconds_per_step_mean"] = _mean(result.seconds_per_step)
    row["lag_max"] = result.largest_lag
    row |= {f"{metric}_last_quarter_mean": _mean(result.last_quarter(metric)) for metric in metrics}
    row["warnings"] = _warnings(result)
    return row | {"diverged": result.count("diverged"), "failed": _num_failed(result)}


# ---- Markdown: for reading ----


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
        "steps (lag/max: the largest). Seconds: total of all steps, without startup; seconds per step: mean "
        "without the first step. Warnings: the detectors that see a failure (docs/failures.md), and the first "
        "step at which each does, run by run."
    )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + f"\n\n{notes}\n"


def _markdown_row(result: VariantResult, metrics: Sequence[str]) -> list[str]:
    cells = [result.label, spread(result.final)]
    cells += [_reward(_mean(result.estimate(value))) for value in (lambda o: o.best, _half)]
    cells += [_steps_cell(result, threshold) for threshold in THRESHOLDS]
    cells += [short(_mean(result.estimate(lambda o: o.seconds))), short(_mean(result.seconds_per_step))]
    lag = short(result.largest_lag)
    cells += [lag if metric == "lag/max" else short(_mean(result.last_quarter(metric))) for metric in metrics]
    cells += [lag] * ("lag/max" not in metrics)
    return [*cells, _warnings(result), str(result.count("diverged")), str(_num_failed(result))]


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


def _steps_cell(result: VariantResult, threshold: float) -> str:
    reached, num_runs = _steps_to(result, threshold), len(result.results)
    if reached is None:
        return "never" if num_runs else "–"
    share = "" if reached.num_runs == num_runs else f" ({reached.num_runs} of {num_runs})"
    return f"{short(reached.mean)}{share}"


def _reward(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


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


def _half(outcome: ExperimentOutcome) -> float | None:
    return outcome.reward_at(outcome.num_steps / 2)


def _steps_to(result: VariantResult, threshold: float) -> Estimate | None:
    return result.estimate(lambda outcome: outcome.steps_to(threshold))


def _num_failed(result: VariantResult) -> int:
    return len(result.outcomes) - len(result.results)


def _mean(estimate: Estimate | None) -> float | None:
    return estimate.mean if estimate else None
