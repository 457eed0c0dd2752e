"""What a comparison came to, in sentences made from its numbers alone."""

import math
from collections.abc import Iterator, Sequence

from grpo_ray.tools.experiments.experiment import Experiment
from grpo_ray.tools.experiments.table import Figure, VariantResult, markdown_table, short, spread


def write_summary(
    experiment: Experiment, results: Sequence[VariantResult], command: str, machine: str, jobs: int
) -> str:
    """`summary.md`: who reached what, the differences to the first variant, and what went wrong."""
    problem = f" (handout, problem {experiment.problem})" if experiment.problem else ""
    sections = [
        f"# {experiment.name}\n\n{experiment.title}{problem}",
        markdown_table(results, experiment.metrics),
    ]
    for title, lines in (
        ("Rewards", list(_rewards(results))),
        ("Seconds", list(_seconds(results, jobs))),
        ("Not as it should be", list(_troubles(results, experiment.metrics))),
    ):
        if lines:
            sections.append(f"## {title}\n\n" + "\n".join(f"- {line}" for line in lines))
    sections.append(f"## Made by\n\n    {command}\n\non {machine}")
    return "\n\n".join(section.strip() for section in sections) + "\n"


def _rewards(results: Sequence[VariantResult]) -> Iterator[str]:
    first = results[0]
    for result in results:
        if result.final is None:
            yield f"**{result.label}**: no result"
            continue
        runs = f"{result.final.num_runs} run{'s' if result.final.num_runs > 1 else ''}"
        difference = ""
        if result is not first and first.final is not None:
            difference = f"; {difference_in_words(first.final, result.final)} {first.label}"
        yield f"**{result.label}**: final validation reward {spread(result.final)} ({runs}){difference}"
    finals = [result.final for result in results if result.final is not None and result.final.sd is not None]
    if len(finals) > 1 and first.final is not None and first.final.sd is not None:
        yield (
            "Within the spread: the means differ by no more than sqrt(sd² + sd²) of the two variants, "
            "standard deviations over seeds. It is no test of significance"
        )


def difference_in_words(first: Figure, other: Figure) -> str:
    """`+0.040, more than the spread (0.012), against`; ends where the first variant's name follows."""
    difference = other.mean - first.mean
    if first.sd is None or other.sd is None:
        return f"{difference:+.3f} (one run: no spread is known) against"
    allowed = math.hypot(first.sd, other.sd)
    relation = "within" if is_within_spread(first, other) else "more than"
    return f"{difference:+.3f}, {relation} the spread ({allowed:.3f}), against"


def is_within_spread(first: Figure, other: Figure) -> bool:
    assert first.sd is not None
    assert other.sd is not None
    return abs(other.mean - first.mean) <= math.hypot(first.sd, other.sd)


def _seconds(results: Sequence[VariantResult], jobs: int) -> Iterator[str]:
    first = results[0].seconds_per_step
    for result in results:
        seconds = result.seconds_per_step
        if seconds is None:
            continue
        ratio = ""
        if result is not results[0] and first is not None:
            ratio = f", {short(seconds.mean / first.mean)} times {results[0].label}'s"
        yield f"**{result.label}**: {short(seconds.mean)} s a step{ratio}"
    if jobs > 1:
        yield f"{jobs} runs at once shared the machine: compare seconds with care"


def _troubles(results: Sequence[VariantResult], metrics: Sequence[str]) -> Iterator[str]:
    for result in results:
        for outcome in result.outcomes:
            if outcome.status != "finished":
                reason = f": {outcome.reason}" if outcome.reason else ""
                yield f"{result.label}, seed {outcome.seed}: {outcome.status}{reason}"
    missing = [metric for metric in metrics if not any(result.last_quarter(metric) for result in results)]
    if missing:
        yield f"in no run's metrics: {', '.join(missing)}"
