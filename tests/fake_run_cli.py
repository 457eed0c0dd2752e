"""A stand-in for `grpo-ray train` that writes the files of a run according to $FAKE_RUNS/script.json.

    {"low-seed0": {"rewards": [0.2, 0.6, 0.9]}, ...}     rewards of equally spaced evaluations
    "meets": 2                           ends once 2 runs are active at the same time
    "ending": "fails" | "not finite" | "waits" (for a signal, with half of the steps done)

It imports nothing from grpo_ray, so that a test can start many.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


def main() -> int:
    base, *overrides = sys.argv[2:]
    assert sys.argv[1] == "train"
    assert Path(base).exists()
    options = dict(override.split("=", 1) for override in overrides)
    name, steps = json.loads(options["run.name"]), int(options["algorithm.num_steps"])
    folder, run = Path(os.environ["FAKE_RUNS"]), Path(json.loads(options["run.output_dir"])) / name
    script = json.loads((folder / "script.json").read_text()).get(name, {})
    with (folder / "launches.txt").open("a") as launches:
        launches.write(f"{name} {base}\n")
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").touch()
    ending = script.get("ending", "finishes")
    if ending == "fails":
        print("Traceback ...\ngrpo-ray: the cluster lacks GPUs\nit has none", flush=True)
        return 2
    if ending == "waits":
        write_run(run, script, steps // 2, steps)
        return wait_for_signal(run, steps // 2)
    if ending == "not finite":
        write_run(run, script, steps // 2, steps)
        write_checkpoint(run, steps // 2 + 1, {"optim/skipped_in_a_row": 3})  # its metrics are not written
        print("grpo-ray: recovery.max_skipped_updates: 3 steps in a row had no finite update.", flush=True)
        return 2
    if "meets" in script:
        meet(folder, name, script["meets"])
    write_run(run, script, steps, steps)
    write_checkpoint(run, steps, {})
    return 0


def meet(folder: Path, name: str, count: int) -> None:
    """Wait until `count` runs are active at the same time; record the largest number seen."""
    here, most, deadline = folder / f"here-{name}", 0, time.monotonic() + 5
    here.touch()
    while time.monotonic() < deadline and most < count:
        most = len(list(folder.glob("here-*")))
        time.sleep(0.02)
    time.sleep(0.3)  # a run too many would be active now
    most = max(most, len(list(folder.glob("here-*"))))
    with (folder / "met.txt").open("a") as met:
        met.write(f"{most}\n")
    time.sleep(0.1)  # let the other runs count this one
    here.unlink()


def wait_for_signal(run: Path, step: int) -> int:
    signals: list[int] = []
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, lambda number, _: signals.append(number))
    (run / "waiting").touch()
    deadline = time.monotonic() + 30
    while not signals and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.3)  # a second signal would be counted, which ends a run at once; not a second SIGHUP
    (run / "signals").write_text(str(sum(number != signal.SIGHUP for number in signals)))
    write_checkpoint(run, step, {})
    return 130


def write_run(run: Path, script: dict[str, Any], last: int, num_steps: int) -> None:
    rewards = script.get("rewards", [0.2, 0.6, 0.9])
    every = num_steps // (len(rewards) - 1)
    evaluations = [{"step": i * every, "reward": r} for i, r in enumerate(rewards) if i * every <= last]
    rows = [{"step": step, "timing/step_s": 1.0, "lag/max": 1} for step in range(1, last + 1)]
    (run / "evaluations").mkdir(exist_ok=True)
    write_lines(run / "metrics.jsonl", rows)
    write_lines(run / "evaluations" / "summary.jsonl", evaluations)


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_checkpoint(run: Path, step: int, metrics: dict[str, float]) -> None:
    state = run / "checkpoints" / f"step-{step:06d}" / "training" / "state.json"
    state.parent.mkdir(parents=True, exist_ok=True)
    state.write_text(json.dumps({"step": step, "ledger": {}, "metrics": metrics, "files": {}}))


if __name__ == "__main__":
    sys.exit(main())
