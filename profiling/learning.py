"""Check that the quickstart learns with every seed, and only with a learning rate.

    python profiling/learning.py [--seeds 0 1 2] [section.key=value ...]

Runs the quickstart once a seed, and once more with learning rate 0 as the control; prints the validation
reward (sampled at temperature 1) at each evaluation, the largest lag, and mean seconds per step.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from grpo_ray.telemetry.run_files import RunDirectory, read_metrics


def run(name: str, overrides: list[str], folder: Path) -> None:
    command = [sys.executable, "-m", "grpo_ray", "train", "configs/quickstart.yaml"]
    command += [f"run.output_dir={folder}", f"run.name={name}", *overrides]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    files = RunDirectory(folder / name)
    metrics = read_metrics(files.metrics_path)
    rewards = [f"{row['step']}: {row['reward']:.3f}" for row in read_metrics(files.evaluations_summary_path)]
    seconds = statistics.fmean(row["timing/step_s"] for row in metrics[3:])
    largest = max(row["lag/max"] for row in metrics)
    print(
        f"{name:<10} validation reward {', '.join(rewards)}  lag/max {largest:.0f}  {seconds:.2f} s per step",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            run(f"seed-{seed}", [f"run.seed={seed}", *options.overrides], Path(folder))
        run(
            "control",
            ["learner.learning_rate=0", f"run.seed={options.seeds[0]}", *options.overrides],
            Path(folder),
        )


if __name__ == "__main__":
    main()
