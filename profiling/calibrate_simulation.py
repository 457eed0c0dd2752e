"""Simulated against real step times: the quickstart with 1, 2 and 4 vLLM Generators; see docs/lab/scale.md.

    RAY_worker_niceness=0 python profiling/calibrate_simulation.py --out runs

The speeds are fitted to synchronous runs of one Generator with 8 and 32 prompts per step. Each run is then
simulated with the lengths of its own groups, in their order. Runs that are already in the folder are kept.

Other programs on the machine disturb the real runs, so CPU time is measured as well. Steps in which they used
more than `--others` cores are left out, and a simulation has the cores that they left on average. In a run to
fit, time is counted at the pace at which its engine had cores, relative to the run of 32 prompts, which must be
undisturbed.
"""

import argparse
import contextlib
import math
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.cpu_log import logging_cpu, read_cpu_log

from grpo_ray.config.loading import load_config
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.tools.arguments import non_negative, positive
from grpo_ray.tools.cli import set_library_defaults
from grpo_ray.tools.simulation.calibration import calibrate, lines_of
from grpo_ray.tools.simulation.command import DEFAULTS
from grpo_ray.tools.simulation.records import RecordedRun, read_run
from grpo_ray.tools.simulation.simulate import simulate
from grpo_ray.tools.simulation.speeds import Speeds, replayed_lengths
from grpo_ray.watch.run_log import Metrics

QUICKSTART = "configs/quickstart.yaml"
WORK = ["evaluation.every_num_steps=1000000", "checkpoint.every_num_steps=1000000", "generator.num_cpus=0.25"]
SYNCHRONOUS = ["generator.num_generators=1", "weight_sync.max_lag=0"]
UNDISTURBED = "1-lag0"
TO_FIT = {UNDISTURBED: SYNCHRONOUS, "fit-8": [*SYNCHRONOUS, "algorithm.prompts_per_step=8"]}
TO_PREDICT = {
    f"{number}-lag{max_lag}": [f"generator.num_generators={number}", f"weight_sync.max_lag={max_lag}"]
    for max_lag in (0, 1)
    for number in (1, 2, 4)
}
MIN_STEPS = 5


@dataclass(frozen=True)
class Measured:
    """A real run, and the cores that other programs used in its measured steps."""

    run: RecordedRun
    others: float
    engine_cores: float
    """CPU seconds of the engines per second of sampling."""


def main() -> int:
    set_library_defaults()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the runs")
    parser.add_argument("--steps", type=positive, default=30, metavar="N", help="of each run (default: 30)")
    parser.add_argument("--others", type=non_negative, default=0.2, metavar="CORES", help="default: 0.2")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    measured = {}
    for name, changes in {**TO_FIT, **TO_PREDICT}.items():
        if not (options.out / name / "reward_curve.png").exists():
            _train(name, [*WORK, *changes, f"algorithm.num_steps={options.steps}"], options.out)
        measured[name] = _measured(options.out / name, math.inf if name in TO_FIT else options.others)
    num_cores = len(os.sched_getaffinity(0))
    engine_cores = measured[UNDISTURBED].engine_cores
    paces = {name: measured[name].engine_cores / engine_cores for name in TO_FIT}
    fitted = calibrate([_at_pace(measured[name].run, pace) for name, pace in paces.items()], num_cores)
    speeds = Speeds.model_validate({**fitted.speeds, "engine_cores": engine_cores})
    for line in lines_of(fitted):
        print(line)
    print(f"engine_cores    {engine_cores:.2f}, from the CPU time of the engine's processes in {UNDISTURBED}")
    print("pace            " + ", ".join(f"{name} {pace:.2f}" for name, pace in paces.items()))
    print(
        "run       steps  others | median s: real, simulated, ratio | mean s: real, simulated, ratio | shares"
    )
    for name in TO_PREDICT:
        _print_row(name, measured[name], speeds, num_cores)
    return 0


def _train(name: str, overrides: list[str], folder: Path) -> None:
    command = [sys.executable, "-m", "grpo_ray", "train", QUICKSTART, *overrides]
    command += [f"run.output_dir={folder}", f"run.name={name}"]
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((folder / f"{name}.log").open("w"))
        run = stack.enter_context(subprocess.Popen(command, stdout=log, stderr=log))
        stack.enter_context(logging_cpu(run.pid, folder / f"{name}.cpu.jsonl"))
        status = run.wait()
    if status:
        raise SystemExit(f"{name} failed; see {folder / name}.log")


def _measured(path: Path, most_others: float) -> Measured:
    """Read a run, and leave out the steps that other programs disturbed."""
    run, cpu = read_run(str(path)), read_cpu_log(path.with_name(f"{path.name}.cpu.jsonl"))
    windows = _windows(run)
    disturbed = frozenset(step for step, window in windows.items() if cpu.others(*window) > most_others)
    run = replace(run, left_out=disturbed)
    if len(run.measured) < MIN_STEPS:
        raise SystemExit(
            f"{path}: other programs left only {len(run.measured)} steps undisturbed; remove the folder and "
            "measure again on an idle machine, or allow more with --others"
        )
    kept = [windows[step] for step in run.measured]
    others = statistics.fmean(cpu.others(*window) for window in kept)
    sampling_s = sum(run.steps[step]["time/generator-0/generate_s"] for step in run.measured)
    return Measured(run, others, sum(cpu.engines_s(*window) for window in kept) / sampling_s)


def _at_pace(run: RecordedRun, pace: float) -> RecordedRun:
    """Return the run with all times multiplied by `pace`; only their differences count."""
    return replace(
        run,
        steps={
            step: {name: value * pace if name.endswith("_s") else value for name, value in metrics.items()}
            for step, metrics in run.steps.items()
        },
        turns={
            name: [replace(turn, begin=turn.begin * pace, end=turn.end * pace) for turn in turns]
            for name, turns in run.turns.items()
        },
        rollouts=[replace(r, begin=r.begin * pace, end=r.end * pace) for r in run.rollouts],
    )


def _windows(run: RecordedRun) -> dict[int, tuple[float, float]]:
    """Return the beginning and the end of each step's line of metrics, in seconds since the epoch."""
    begin = min(turn.begin for turn in run.turns["driver"])
    windows = {}
    for step in sorted(run.steps):
        windows[step] = begin, begin + run.steps[step]["timing/step_s"]
        begin = windows[step][1]
    return windows


def _print_row(name: str, real: Measured, speeds: Speeds, num_cores: int) -> None:
    run = real.run
    speeds = speeds.model_copy(update={"cores": num_cores - real.others})
    config = load_config(str(run.path / "config.yaml"), [*DEFAULTS])
    lengths = replayed_lengths(str(run.path), config.algorithm.samples_per_prompt)
    with tempfile.TemporaryDirectory() as folder:
        simulated = simulate(config, RunDirectory(f"{folder}/run"), speeds, lengths)
    rows = [run.steps[step] for step in run.measured]
    same = [simulated.steps[step - 1] for step in run.measured]
    real_s, simulated_s = _seconds(rows), _seconds(same)
    shares = "; ".join(
        f"{what} {_share(rows, key):.0%} -> {_share(same, key):.0%}" for what, key in SHARES.items()
    )
    seconds = "".join(f" | {r:.2f} {s:.2f} {s / r:.2f}" for r, s in zip(real_s, simulated_s, strict=True))
    print(f"{name:8}  {len(rows):5}  {real.others:6.2f}{seconds} | {shares}")


SHARES = {
    "waiting for a batch": "timing/wait_for_batch_s",
    "Generators": "utilization/generators",
    "Learner": "utilization/learner",
}


def _seconds(rows: list[Metrics]) -> tuple[float, float]:
    """Return the median and the mean of the steps' seconds."""
    seconds = [row["timing/step_s"] for row in rows]
    return statistics.median(seconds), statistics.fmean(seconds)


def _share(rows: list[Metrics], key: str) -> float:
    if key.startswith("utilization"):
        return statistics.fmean(row[key] for row in rows)
    return sum(row[key] for row in rows) / sum(row["timing/step_s"] for row in rows)


if __name__ == "__main__":
    sys.exit(main())
