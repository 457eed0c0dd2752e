"""What one-version-behind buys over synchronous, on the same work in one run of this script.

    python profiling/overlap.py [--steps 20] [--rounds 2] [section.key=value ...]

The quickstart's job with learning rate 0, so that every step does the same work, and with the Generator's
processes held to one core and the Learner's to another, as to their own GPUs on a cluster. The schedules take
turns, so that a drift of the machine's speed meets both. Prints seconds a step, the split, and the ratio;
writes profiling/results/overlap.json.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from grpo_ray.telemetry.run_files import RunDirectory, read_metrics

SKIPPED_STEPS = 4  # the first batches warm both processes up
WORK = [
    "learner.learning_rate=0",
    "generator.cpu_cores=[0]",
    "learner.cpu_cores=[1]",
    "evaluation.every_num_steps=1000000",
    "run.save_rollouts=false",
]
SPLIT = {
    "generate": "timing/generate_s",
    "wait for batch": "timing/wait_for_batch_s",
    "train": "timing/train_s",
    "sync: pause": "timing/weight_sync/pause_s",
    "sync: transfer": "timing/weight_sync/transfer_s",
    "sync: resume": "timing/weight_sync/resume_s",
}


def run_schedule(max_lag: int, steps: int, overrides: list[str], folder: Path) -> list[dict[str, float]]:
    """The metrics of one run's steady steps."""
    name = f"lag{max_lag}-{len(list(folder.iterdir()))}"
    command = [sys.executable, "-m", "grpo_ray.cli", "train", "configs/quickstart.yaml", *WORK]
    command += [f"algorithm.num_steps={steps}", f"weight_sync.max_lag={max_lag}"]
    command += [f"run.output_dir={folder}", f"run.name={name}", *overrides]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    # The last step has no generation beside it.
    return read_metrics(RunDirectory(folder / name).metrics_path)[SKIPPED_STEPS:-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=20, help="steps of each run")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each schedule")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    rows: dict[int, list[dict[str, float]]] = {0: [], 1: []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            for max_lag, collected in rows.items():
                collected += run_schedule(max_lag, options.steps, options.overrides, Path(folder))
    # Means, not medians: one step's delay can be the next one's head start.
    means = {
        lag: {k: statistics.fmean(r[k] for r in collected) for k in collected[0]}
        for lag, collected in rows.items()
    }
    ratio = means[1]["timing/step_s"] / means[0]["timing/step_s"]
    print(f"{'seconds a step':<16}{'max_lag 0':>12}{'max_lag 1':>12}")
    for label, key in {"whole step": "timing/step_s", **SPLIT}.items():
        print(f"{label:<16}{means[0][key]:>12.3f}{means[1][key]:>12.3f}")
    for label, key in {
        "Learner busy": "utilization/learner",
        "Generator busy": "utilization/generators",
    }.items():
        print(f"{label:<16}{means[0][key]:>12.0%}{means[1][key]:>12.0%}")
    largest = [max(row["lag/max"] for row in collected) for collected in rows.values()]
    print(f"{'largest lag':<16}{largest[0]:>12.0f}{largest[1]:>12.0f}")
    print(f"ratio of whole steps: {ratio:.2f}  ({len(rows[0])} and {len(rows[1])} steps)")
    results = Path("profiling/results")
    results.mkdir(exist_ok=True)
    machine = {"processor": platform.processor(), "machine": platform.machine(), "torch": torch.__version__}
    (results / "overlap.json").write_text(json.dumps({"ratio": ratio, "means": means, **machine}, indent=1))


if __name__ == "__main__":
    main()
