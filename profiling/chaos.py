"""Train under faults: inject faults into a real run at random moments, and audit it at the end.

    python profiling/chaos.py CONFIG [--faults 20] [--seed 0] [--seeds 1] [--kinds kill_learner,delay]
        [--pause 4] [--baseline-seeds 0,1,2] [--folder runs/chaos] [--table docs/chaos.md]
        [section.key=value ...]

Each seed draws faults, moments and victims, and seeds its run, in FOLDER/seed-N. The outcome of a fault is read
from the run's own files; the run ends a few steps after the last fault, and everything it wrote is audited. The
table covers all seeds in the folder, including those of earlier calls. The exit status is 1 if the run did not
recover from a fault, if a fault had another outcome than it must, or if the audit finds a problem.
"""

import argparse
import random
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from chaos_baseline import compare, run_baseline
from chaos_faults import COUNTED, FAULTS, OUTCOMES, RESUMED, RODE_THROUGH, Fault, can_meet, draws
from chaos_results import NOT_RECOVERED, Record, add_record, read_results, table, write_audit, write_table
from chaos_run import ChaosRun, RunEnded

from grpo_ray.config.loading import load_config
from grpo_ray.tools.audit.audit import audit

ENDLESS = "algorithm.num_steps=1000000"  # until the last fault
PAIR_PROBABILITY = 0.2  # two faults at once
LONGEST_S = 300.0  # for one recovery
SETTINGS = [
    "checkpoint.every_num_steps=3",
    "recovery.max_restarts=10000",
    "recovery.max_restores=10000",
    "recovery.restart_backoff_s=0",
    "recovery.stall_timeout_s=20",
    "weight_sync.phase_timeout_s=10",
]


class Campaign:
    """One seed: its run, its faults and their outcomes."""

    def __init__(self, seed: int, folder: Path, kinds: Sequence[str], pause_s: float) -> None:
        self.seed, self.folder, self._pause_s = seed, folder, pause_s
        self.run = ChaosRun(folder)
        self._draw = random.Random(f"chaos/{seed}")
        self._kinds = draws(list(kinds), self._draw)

    def begin(self, config: str, overrides: Sequence[str]) -> None:
        self.run.start(config, [*SETTINGS, f"run.seed={self.seed}", *overrides, ENDLESS])
        self._wait_for_step(2)

    def inject_all(self, num_faults: int) -> None:
        """Inject faults one after another, some in pairs; the run recovers from each before the next."""
        num_injected = 0
        while num_injected < num_faults:
            faults = [FAULTS[next(self._kinds)]]
            if num_faults - num_injected > 1 and self._draw.random() < PAIR_PROBABILITY:
                other = FAULTS[next(self._kinds)]
                if can_meet(faults[0], other):
                    faults = sorted([faults[0], other], key=lambda fault: fault.ends_driver)
                else:
                    self._one_fault([faults[0]])
                    num_injected, faults = num_injected + 1, [other]
            num_injected += self._one_fault(faults)

    def end(self, every_num_steps: int) -> None:
        """Train a few more steps, to the next evaluation, and let the run end by itself."""
        self.run.interrupt()
        beyond = self.run.last_step() + 2  # the checkpoint's step may have no line yet
        num_steps = (beyond // every_num_steps + 1) * every_num_steps
        self.run.resume(f"algorithm.num_steps={num_steps}")
        status = self.run.wait_for_end(900)
        if status:
            raise RunEnded(f"the last part ended with status {status}: {self.run.last_words()}")

    def _wait_for_step(self, step: int, timeout_s: float = LONGEST_S) -> None:
        self.run.wait_for(lambda: self.run.last_step() >= step, timeout_s, f"step {step}")

    def _one_fault(self, faults: list[Fault]) -> int:
        """Inject the faults at once, wait, and record the outcome; returns the number of faults."""
        time.sleep(self._draw.uniform(0.0, self._pause_s))
        step, began, since = self.run.last_step(), time.monotonic(), time.time()
        try:
            did = self._inject(faults)
            faults = [fault for fault, what in zip(faults, did, strict=True) if what]
            if not faults:
                return 0  # there is no such process in this run
            outcome = self._recover(faults, step, since)
            seconds = time.monotonic() - began
            left = self.run.bury_stopped()
        except (RunEnded, TimeoutError) as error:
            did, outcome, seconds, left = [str(error)], NOT_RECOVERED, time.monotonic() - began, []
            self._revive()
        done = [what for what in [*did, *left] if what]
        record = Record(self.seed, step, tuple(f.name for f in faults), "; ".join(done), outcome, seconds)
        add_record(self.folder, record)
        print(f"seed {self.seed}, step {step}: {record}", flush=True)
        return len(faults)

    def _inject(self, faults: list[Fault]) -> list[str | None]:
        """Inject the faults in parallel, as some take seconds."""
        seeds = [self._draw.random() for _ in faults]
        with ThreadPoolExecutor(len(faults)) as pool:
            jobs = []
            for fault, seed in zip(faults, seeds, strict=True):
                jobs.append(pool.submit(fault.inject, self.run, random.Random(seed)))
                if len(faults) > 1:
                    time.sleep(seed)
            return [job.result() for job in jobs]

    def _recover(self, faults: list[Fault], step: int, since: float) -> str:
        """Wait until the run has handled every fault and made progress; returns the outcome."""
        self.run.wait_for(lambda: self._is_handled(faults, since), LONGEST_S, "an event about the fault")
        may_be_counted = any(COUNTED in fault.outcomes for fault in faults)
        self._wait_for_step(max(self.run.last_step(), step) + (3 if may_be_counted else 1))
        outcomes = [RESUMED] * any(fault.ends_driver for fault in faults)
        outcomes += [OUTCOMES[event["kind"]] for event in self.run.events(since, *OUTCOMES)]
        outcomes += [COUNTED] * (may_be_counted and self.run.num_errors(step, since) > 0)
        return ", ".join(dict.fromkeys(outcomes)) or RODE_THROUGH

    def _is_handled(self, faults: list[Fault], since: float) -> bool:
        if any(self.run.triggers.iterdir()):
            return False
        last = {event["actor"]: event["kind"] for event in self.run.events(since)}
        kinds = {event["kind"] for event in self.run.events(since)}
        if "restored" in kinds or any(fault.ends_driver for fault in faults):
            return True
        is_replacing = any(kind in ("generator_failed", "scorer_failed") for kind in last.values())
        return not is_replacing and all(fault.event is None or fault.event in kinds for fault in faults)

    def _revive(self) -> None:
        """Restart a run that ended or is stuck, as an operator would."""
        for trigger in self.run.triggers.iterdir():
            trigger.unlink()
        step = self.run.last_step()
        if self.run.is_driven:
            self.run.kill()
        self.run.resume()
        self._wait_for_step(step + 1)


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the run is ended, too
    kinds = options.kinds.split(",") if options.kinds else list(FAULTS)
    for seed in range(options.seed, options.seed + options.seeds):
        folder = Path(options.folder) / f"seed-{seed}"
        if (folder / "run").exists():
            raise SystemExit(f"{folder} already has a run; give another --folder or --seed")
        one_seed(seed, folder, kinds, options)
    baselines = [int(seed) for seed in options.baseline_seeds.split(",") if seed]
    if baselines:
        runs = [run_baseline(Path(options.folder), options.config, options.overrides, s) for s in baselines]
        for seed in range(options.seed, options.seed + options.seeds):
            compare(Path(options.folder) / f"seed-{seed}", runs)
    text, is_good = table(read_results(Path(options.folder)))
    print(text)
    if options.table:
        write_table(Path(options.table), text)
    return 0 if is_good else 1


def one_seed(seed: int, folder: Path, kinds: Sequence[str], options: argparse.Namespace) -> None:
    campaign = Campaign(seed, folder, kinds, options.pause)
    try:
        campaign.begin(options.config, options.overrides)
        campaign.inject_all(options.faults)
        campaign.end(load_config(campaign.run.run.config_path).evaluation.every_num_steps)
    finally:
        campaign.run.end()
    report = audit(campaign.run.run)
    print(f"seed {seed}: {report}", flush=True)
    write_audit(folder, report)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("--faults", type=int, default=20, help="faults per run")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run")
    parser.add_argument("--seeds", type=int, default=1, help="number of runs, one after another")
    parser.add_argument("--kinds", default="", help=f"some of {','.join(FAULTS)}; default: all")
    parser.add_argument("--pause", type=float, default=4.0, help="longest wait before a fault, in seconds")
    parser.add_argument("--baseline-seeds", default="", help="seeds of undisturbed runs to compare with")
    parser.add_argument("--folder", default="runs/chaos", help="folder of the runs and their outcomes")
    parser.add_argument("--table", default="", help="Markdown file; the table goes between its marks")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_intermixed_args()
    unknown = set(filter(None, options.kinds.split(","))) - FAULTS.keys()
    if unknown:
        parser.error(f"--kinds: unknown fault {', '.join(sorted(unknown))}; choose from {', '.join(FAULTS)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
