"""Whole runs of the quickstart, started as a user would, for benchmarks that compare runs."""

import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.results import Options, Row
from grpo_ray.records.run_files import RunDirectory, read_metrics

SKIPPED_STEPS = 4  # warm-up of Generator and Learner
QUICK_STEPS = 8


def train(
    name: str, overrides: Sequence[str], folder: Path, config: str = "configs/quickstart.yaml"
) -> RunDirectory:
    """Train a configuration with `overrides` through the command line; raises when it fails."""
    command = [sys.executable, "-m", "grpo_ray", "train", config, *overrides]
    command += [f"run.output_dir={folder}", f"run.name={name}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return RunDirectory(folder / name)


def steady_means(run: RunDirectory) -> Mapping[str, float]:
    """Return each metric's mean, without the first few steps and the last, which has no generation in parallel.

    Means, not medians: a delay in one step can be a head start for the next.
    """
    known: dict[str, list[float]] = defaultdict(list)
    for row in read_metrics(run.metrics_path)[SKIPPED_STEPS:-1]:
        for name, value in row.items():
            if value is not None:
                known[name].append(value)
    if not known:
        raise ValueError(f"a run needs {SKIPPED_STEPS + 2} steps or more to be measured")
    return {name: statistics.fmean(values) for name, values in known.items()}


def compare_runs(
    cases: Mapping[str, Sequence[str]], common: Sequence[str], options: Options, facts: Mapping[str, str], *,
    num_steps: int, rounds: int, has_seeds: bool = False,
    also: Callable[[RunDirectory], Mapping[str, float]] = lambda run: {},
) -> list[Row]:  # fmt: skip
    """Train each case in turns; return a row per case: seconds per step of each run, and means of metrics.

    Args:
        cases: overrides by name; the first is the baseline.
        common: overrides of all.
        facts: the metric of each fact, by the fact's name in the table; a case may lack some.
        num_steps: of each run, unless `options.quick`.
        has_seeds: give each round a seed of its own.
        also: returns further metrics of a run.
    """
    means: dict[str, list[Mapping[str, float]]] = {name: [] for name in cases}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds or (1 if options.quick else rounds)):
            for place, (name, overrides) in enumerate(cases.items()):
                given = [*common, f"algorithm.num_steps={QUICK_STEPS if options.quick else num_steps}"]
                given += [f"run.seed={number}"] * has_seeds
                run = train(f"{place}-{number}", [*given, *overrides, *options.overrides], Path(folder))
                means[name].append({**steady_means(run), **also(run)})
    return [
        Row(
            name,
            tuple(mean["timing/step_s"] for mean in of_runs),
            next(iter(cases)),
            facts={
                fact: statistics.fmean(mean[key] for mean in of_runs)
                for fact, key in facts.items()
                if key in of_runs[0]
            },
        )
        for name, of_runs in means.items()
    ]
