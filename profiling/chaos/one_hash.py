"""One hash under fire: a run that is hit by kills ends with the weights and rollouts of the undisturbed run.

    python profiling/chaos/one_hash.py CONFIG [section.key=value ...] [--kills 40] [--seeds 0 1 2] [--steps 60]
        [--every 3] [--folder runs/one-hash]

For each seed the same synchronous run on Ray, with the torch engine, is made twice: left alone, and with kills
of a process chosen at random each time, at most `--every` seconds after it has recovered from the one before.
The driver is resumed when it is hit. Prints both runs' hashes, as `grpo-ray audit --hash` does, and the first
difference; the exit status is 1 if there is one.
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

from grpo_ray.records.run_files import RunDirectory
from grpo_ray.tools.audit.hashes import first_difference, hashes

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
) -> tuple[RunDirectory, Counter[str]]:
    """Run to the end; return the run, and the kills by the kind of process."""
    run, hit = ChaosRun(folder), Counter[str]()
    run.start(config, list(overrides))
    wait_for_progress(run, 0)
    while hit.total() < num_kills and run.is_driven:
        time.sleep(draw.uniform(0.0, every_s))
        step, victim = run.last_step(), draw.choice([DRIVER, *run.actors()])
        if not killed(run, victim):
            continue
        hit[victim.split("-")[0]] += 1
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
    deadline = time.monotonic() + LIMIT_S
    while run.last_step() <= step:
        try:
            run.check_alive()
        except RunEnded as error:
            if error.status != 0:
                raise
            return False
        if time.monotonic() > deadline:
            raise TimeoutError(f"no step after {step} within {LIMIT_S:g} s: {run.last_words()}")
        time.sleep(0.2)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=float, default=3.0, metavar="S")
    parser.add_argument("--folder", type=Path, default=Path("runs/one-hash"))
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
            "seed": seed, "steps": options.steps, "kills": hit.total(), "by": dict(hit),
            "seconds": round(time.monotonic() - started), "alone": hashes(alone), "under_fire": hashes(hit_run),
            "first_difference": differences[-1],
        }  # fmt: skip
        print(json.dumps(found), flush=True)
    return int(any(differences))


if __name__ == "__main__":
    sys.exit(main())
