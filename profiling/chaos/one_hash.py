"""One hash under fire: a run that is hit by kills ends with the weights and rollouts of the undisturbed run.

    python profiling/chaos/one_hash.py CONFIG [section.key=value ...] [--kills 40] [--seeds 0 1 2] [--steps 60]
        [--every 3] [--folder runs/one-hash] [--plot PNG]

For each seed the same synchronous run on Ray, with the torch engine, is made twice: left alone, and with kills
of a process chosen at random each time, at most `--every` seconds after it has recovered from the one before.
The driver is resumed when it is hit. Prints both runs' hashes, as `grpo-ray audit --hash` does, and the first
difference; the exit status is 1 if there is one. Draws the rewards of the last seed's runs, and the kills.
"""

import argparse
import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from chaos_run import ChaosRun, RunEnded
from chaos_scenarios import BUDGETS, SMALL, TORCH

from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.tools.audit.checkpoint import first_difference, hashes
from grpo_ray.tools.drawing.figures import COLORS, GRID, new_figure, tidy

EXACT = (*SMALL, *TORCH, *BUDGETS, "weight_sync.max_lag=0", "checkpoint.every_num_steps=1")
DRIVER, LIMIT_S = "driver", 300.0


def undisturbed(folder: Path, config: str, overrides: Sequence[str]) -> RunDirectory:
    run = ChaosRun(folder)
    run.start(config, list(overrides))
    if status := run.wait_for_end(3600.0):
        raise RunEnded(f"the undisturbed run ended with status {status}: {run.last_words()}")
    return run.run


def under_fire(
    folder: Path, config: str, overrides: Sequence[str], num_kills: int, every_s: float, draw: random.Random
) -> tuple[RunDirectory, list[tuple[int, str]]]:
    """Run to the end; return the run, and each kill's step and process."""
    run, hit = ChaosRun(folder), list[tuple[int, str]]()
    run.start(config, list(overrides))
    wait_for_progress(run, 0)
    while len(hit) < num_kills and run.is_driven:
        time.sleep(draw.uniform(0.0, every_s))
        step, victim = run.last_step(), draw.choice([DRIVER, *run.actors()])
        if not killed(run, victim):
            continue
        hit.append((step, victim))
        if not wait_for_progress(run, step):
            break
    if run.is_driven and (status := run.wait_for_end(3600.0)):
        raise RunEnded(f"the run under fire ended with status {status}: {run.last_words()}")
    return run.run, hit


def killed(run: ChaosRun, victim: str) -> bool:
    if victim == DRIVER:
        run.kill()
        run.resume()
    elif (process := run.actor(victim)) is None:
        return False
    else:
        process.send_signal(signal.SIGKILL)
    return True


def wait_for_progress(run: ChaosRun, step: int) -> bool:
    """Wait for a line of a later step; return False if the run is finished."""
    try:
        run.wait_for(lambda: run.last_step() > step, LIMIT_S, f"a step after {step}", 0.2)
    except RunEnded as error:
        if error.status != 0:
            raise
        return False
    return True


def plot(runs: Sequence[RunDirectory], hit: Sequence[tuple[int, str]], path: Path) -> None:
    """Draw the rewards of the run left alone and of the one under fire, over the kills of each process."""
    figure = new_figure(8, 5)
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    for run, label, width, color in zip(
        runs, ("left alone", "under fire"), (7, 2), (GRID, COLORS[0]), strict=True
    ):
        rows = read_metrics(run.metrics_path)
        above.plot(
            [r["step"] for r in rows], [r["reward/mean"] for r in rows], color=color, lw=width, label=label
        )
    above.legend(frameon=False)
    below.scatter(*zip(*sorted(hit, key=lambda kill: kill[1]), strict=True), marker="x", color=COLORS[1])
    tidy(above, "", "reward")
    tidy(below, "step", f"{len(hit)} kills")
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=float, default=3.0, metavar="S")
    parser.add_argument("--folder", type=Path, default=Path("runs/one-hash"))
    parser.add_argument("--plot", type=Path, metavar="PNG")
    options = parser.parse_args()
    differences = []
    for seed in options.seeds:
        overrides = [*EXACT, f"algorithm.num_steps={options.steps}", f"run.seed={seed}", *options.overrides]
        folder, draw = options.folder / f"{seed}-{int(time.time())}", random.Random(seed)
        alone = undisturbed(folder / "alone", options.config, overrides)
        started, given = time.monotonic(), (folder / "under-fire", options.config, overrides)
        hit_run, hit = under_fire(*given, options.kills, options.every, draw)
        differences.append(first_difference(alone, hit_run))
        found = {
            "seed": seed, "steps": options.steps, "kills": len(hit), "by": Counter(victim for _, victim in hit),
            "seconds": round(time.monotonic() - started), "alone": hashes(alone), "under_fire": hashes(hit_run),
            "first_difference": differences[-1],
        }  # fmt: skip
        print(json.dumps(found), flush=True)
        if options.plot is not None:
            plot((alone, hit_run), hit, options.plot)
    return int(any(differences))


if __name__ == "__main__":
    sys.exit(main())
