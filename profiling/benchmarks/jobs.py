"""Whole runs of the quickstart, started as a user would, for benchmarks that compare runs."""

import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.results import Row
from grpo_ray.records.run_files import RunDirectory, read_metrics

SKIPPED_STEPS = 4  # warm-up of Generator and Learner


def train(
    name: str, overrides: Sequence[str], folder: Path, program: Sequence[str] = ("-m", "grpo_ray"),
    config: str = "configs/quickstart.yaml",
) -> RunDirectory:  # fmt: skip
    """Train a configuration with `overrides` through the command line `program`; raises when it fails."""
    command = [sys.executable, *program, "train", config, *overrides]
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


def rows_of(
    means: Mapping[str, Sequence[Mapping[str, float]]], baseline: str, facts: Mapping[str, str]
) -> list[Row]:
    """Return a row per case: seconds per step of each of its runs, and the mean of some metrics over them.

    Args:
        means: by case, the means of each run's metrics.
        facts: the metric of each fact, by the fact's name in the table.
    """
    return [
        Row(
            name,
            tuple(mean["timing/step_s"] for mean in of_runs),
            baseline,
            facts={fact: statistics.fmean(mean[key] for mean in of_runs) for fact, key in facts.items()},
        )
        for name, of_runs in means.items()
    ]
