"""Check that a configuration learns with every seed, and that a control does not.

    python profiling/learning.py [CONFIG] [--seeds 0 1 2] [section.key=value ...]
    python profiling/learning.py smollm2-sums --shuffled last_number --out runs/sums --plot sums.png \\
        model.path=smollm2

Trains CONFIG (the quickstart) once per seed, and once more as the control: with learning rate 0, or with the
rewards of each group in random order. Prints the validation reward (sampled at temperature 1) at each
evaluation, and the last one of all seeds together with its 95% interval. With the same --out it goes on.
"""

import argparse
import math
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path

from benchmarks import jobs

from grpo_ray.records.run_files import read_metrics
from grpo_ray.tools.cli import set_library_defaults
from grpo_ray.tools.drawing.figures import draw_spread, legend_beside, new_figure, tidy

Rewards = dict[int, tuple[float, int]]  # by step: the mean, and the number of responses


def train(config: str, name: str, overrides: list[str], folder: Path) -> Rewards:
    """Run one job to its end and print its validation rewards."""
    files = jobs.train(name, ["run.if_exists=resume", *overrides], folder, config=config)
    metrics = read_metrics(files.metrics_path)
    found = {
        row["step"]: (row["reward"], row["num_examples"] * row["num_samples"])
        for row in read_metrics(files.evaluations_summary_path)
    }
    seconds = statistics.fmean(row["timing/step_s"] for row in metrics[3:])
    largest = max(row["lag/max"] for row in metrics)
    shown = ", ".join(f"{step}: {reward:.3f}" for step, (reward, _) in found.items())
    print(f"{name:<10} validation reward {shown}  lag/max {largest:.0f}  {seconds:.2f} s per step", flush=True)
    return found


def print_together(runs: list[Rewards]) -> None:
    """Print the last reward of all seeds, each response of which is right or wrong, with its 95% interval."""
    last = [run[max(run)] for run in runs]
    number = sum(responses for _, responses in last)
    mean = sum(reward * responses for reward, responses in last) / number
    half = 1.96 * math.sqrt(mean * (1 - mean) / number)
    print(f"all seeds  {mean:.3f}, 95% interval {mean - half:.3f} to {mean + half:.3f} ({number} responses)")


def plot(seeds: list[Rewards], control: Rewards, control_name: str, path: Path) -> None:
    """Draw the mean over the seeds with its band, and the control."""
    figure = new_figure(8, 4)
    axis = figure.subplots()
    for index, (label, runs) in enumerate({f"{len(seeds)} seeds": seeds, control_name: [control]}.items()):
        by_step: dict[float, list[float]] = defaultdict(list)
        for run in runs:
            for step, (reward, _) in run.items():
                by_step[step].append(reward)
        draw_spread(axis, index, label, sorted(by_step.items()), has_markers=True)
    axis.set_ylim(0, 1)
    tidy(axis, "step", "validation reward")
    legend_beside(figure, "")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("config", nargs="?", default="configs/quickstart.yaml", metavar="CONFIG")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--shuffled",
        metavar="REWARD",
        help="the control shuffles this reward (default: it has learning rate 0)",
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep the runs here")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the rewards")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_intermixed_args()
    if "=" in options.config:
        options.config, options.overrides = "configs/quickstart.yaml", [options.config, *options.overrides]
    set_library_defaults()
    change, control_name = "learner.learning_rate=0", "learning rate 0"
    if options.shuffled is not None:
        arguments = f"arguments: {{reward: {options.shuffled}}}"
        change = f'task.reward=[{{reward: "examples.rewards.shuffled:shuffled", batched: true, {arguments}}}]'
        control_name = "shuffled rewards"
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.out or Path(temporary)
        seeds = [
            train(options.config, f"seed-{seed}", [f"run.seed={seed}", *options.overrides], folder)
            for seed in options.seeds
        ]
        print_together(seeds)
        own = [f"run.seed={options.seeds[0]}", *options.overrides, change]
        control = train(options.config, "control", own, folder)
    if options.plot is not None:
        plot(seeds, control, control_name, options.plot)


if __name__ == "__main__":
    main()
