"""Whole runs of the quickstart, started as a user would, for benchmarks that compare runs."""

import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from grpo_ray.telemetry.run_files import RunDirectory, read_metrics

SKIPPED_STEPS = 4  # warm-up of Generator and Learner


def train(
    name: str, overrides: Sequence[str], folder: Path, program: Sequence[str] = ("-m", "grpo_ray")
) -> RunDirectory:
    """Train the quickstart with `overrides` through the command line `program`; raises when it fails."""
    command = [sys.executable, *program, "train", "configs/quickstart.yaml", *overrides]
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
