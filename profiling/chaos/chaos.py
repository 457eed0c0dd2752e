"""Train under faults: inject faults into real runs at random moments, and audit each run at its end.

    python profiling/chaos/chaos.py CONFIG [--scenarios torch,replay] [--faults 10] [--seed 0]
        [--kinds kill_learner,delay] [--pause 3] [--folder runs/chaos] [section.key=value ...]

Each scenario (chaos_scenarios.py; `replay+mixture` is both at once) is one run in FOLDER/SCENARIO-SEED with
FAULTS faults, each of a kind that the campaign has drawn least so far. The outcome of a fault is read from the
run's own files; the run is interrupted after the last fault, and everything it wrote is audited.
FOLDER/results.jsonl has a line per fault and per audit: a campaign that was interrupted continues with the
same command, and --faults 0 only prints the table. The exit status is 1 if the run did not recover from a
fault, if a fault had another outcome than it must, or if an audit finds a problem. Faults of disks and memory
need root; without it they are not drawn.
"""

import argparse
import random
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from chaos_cluster import Cluster
from chaos_disk import Disk, in_own_namespace
from chaos_faults import COUNTED, FAULTS, OUTCOMES, RESUMED, RODE_THROUGH, Fault
from chaos_memory import Memory, own_shared_memory
from chaos_results import BUDGET_USED_UP, NOT_POSSIBLE, NOT_RECOVERED, Audited, Record, Results, commit, table
from chaos_run import INTERRUPTED, ChaosRun, RunEnded
from chaos_scenarios import SCENARIOS, Scenario, overrides_of, scenario_of

ENDLESS = "algorithm.num_steps=1000000"  # until the last fault
PAIR_PROBABILITY = 0.25  # two faults at once
FAILED = ("generator_failed", "scorer_failed", "environment_failed")
LONGEST_S = 900.0  # for one recovery, on a machine that others use


class Campaign:
    """One scenario with one seed: its run, its faults and their outcomes."""

    def __init__(self, name: str, run: ChaosRun, results: Results, options: argparse.Namespace) -> None:
        self._scenario, self._seed, self._pause_s = name, options.seed, options.pause
        self.run, self._results = run, results
        abilities = set(scenario_of(name).words)
        abilities |= {name for name, tool in (("disk", run.disk), ("memory", run.memory)) if tool}
        self._has_default_budgets = "default-budgets" in abilities
        kinds = options.kinds.split(",") if options.kinds else list(FAULTS)
        self._kinds = [kind for kind in kinds if FAULTS[kind].needs in {"", *abilities}]

    def begin(self, config: str, overrides: Sequence[str]) -> None:
        """Start the run, or continue the one of a campaign that was interrupted."""
        if self.run.run.config_path.exists():
            self.run.resume(ENDLESS)
            self._wait_for_step(self.run.last_step() + 1)
        else:
            self.run.start(config, [*overrides, ENDLESS])
            self._wait_for_step(2)

    def inject_all(self, num_faults: int) -> None:
        """Inject faults one after another, some in pairs; the run recovers from each before the next."""
        while self._num_injected() < num_faults:
            draw = random.Random(f"{self._seed}/{self._scenario}/{len(self._results.records)}")
            faults = [self._draw(draw, self._kinds)]
            meeting = [kind for kind in self._kinds if FAULTS[kind].is_plain and kind != faults[0].name]
            if (
                faults[0].is_plain
                and meeting
                and num_faults - self._num_injected() > 1
                and draw.random() < PAIR_PROBABILITY
            ):
                faults.append(self._draw(draw, meeting))
            self._one_fault(faults, draw)

    def _num_injected(self) -> int:
        ours = [r for r in self._results.records if (r.scenario, r.seed) == (self._scenario, self._seed)]
        return sum(len(record.faults) for record in ours)

    def _draw(self, draw: random.Random, kinds: Sequence[str]) -> Fault:
        """Draw among the kinds that were drawn least."""
        drawn = self._results.num_drawn()
        least = min(drawn[kind] for kind in kinds)
        return FAULTS[draw.choice([kind for kind in kinds if drawn[kind] == least])]

    def end(self) -> None:
        """Let the run end with a checkpoint of its last step."""
        status = self.run.interrupt()
        if status != INTERRUPTED:
            raise RunEnded(f"the run ended with status {status}: {self.run.last_words()}")

    def _wait_for_step(self, step: int) -> None:
        self.run.wait_for(lambda: self.run.last_step() >= step, LONGEST_S, f"step {step}")

    def _one_fault(self, faults: list[Fault], draw: random.Random) -> None:
        """Inject the faults at once, wait, and record the outcome."""
        time.sleep(draw.uniform(0.0, self._pause_s))
        step, began, since = self.run.last_step(), time.monotonic(), time.time()
        did: list[str | None] = []
        try:
            did = self._inject(faults, draw)
            faults = [fault for fault, what in zip(faults, did, strict=True) if what] or faults
            outcome = self._recover(faults, step, since) if any(did) else NOT_POSSIBLE
            seconds = time.monotonic() - began
            self.run.bury()
            self.run.check_said(since)
        except (RunEnded, TimeoutError, OSError) as error:
            outcome, seconds = NOT_RECOVERED, time.monotonic() - began
            if self._has_default_budgets and self.run.has_used_up_a_budget():
                outcome = BUDGET_USED_UP
            else:
                self.run.wrong.append(str(error))
            self._revive()
        names, what = tuple(fault.name for fault in faults), "; ".join(filter(None, did))
        wrong, self.run.wrong = tuple(self.run.wrong), []
        record = Record(self._scenario, self._seed, commit(), step, names, what, outcome, wrong, seconds)
        self._results.add(record)
        mark = "" if record.is_as_it_must_be else "  <-- NOT AS IT MUST BE"
        print(f"{time.strftime('%H:%M:%S')} {self._scenario}, step {step}: {record}{mark}", flush=True)

    def _inject(self, faults: list[Fault], draw: random.Random) -> list[str | None]:
        """Inject the faults in parallel, as some take seconds."""
        seeds = [draw.random() for _ in faults]
        with ThreadPoolExecutor(len(faults)) as pool:
            jobs = []
            for fault, seed in zip(faults, seeds, strict=True):
                jobs.append(pool.submit(fault.inject, self.run, random.Random(seed)))
                if len(faults) > 1:
                    time.sleep(seed)
            did = [job.result() for job in jobs]
        if any(fault.ends_driver for fault in faults) and not self.run.is_driven:
            self.run.resume()
        return did

    def _recover(self, faults: list[Fault], step: int, since: float) -> str:
        """Wait until the run has handled every fault and made progress; returns the outcome."""
        self.run.wait_for(lambda: self._is_handled(faults, since), LONGEST_S, "an event about the fault")
        may_be_counted = any(COUNTED in (*fault.outcomes, *fault.or_else) for fault in faults)
        self._wait_for_step(max(self.run.last_step(), step) + (3 if may_be_counted else 1))
        outcomes = [RESUMED] * any(fault.ends_driver for fault in faults)
        if not outcomes:
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
        is_replacing = any(kind in FAILED for kind in last.values())
        return not is_replacing and all(fault.event is None or fault.event in kinds for fault in faults)

    def _revive(self) -> None:
        """Restart a run that ended or is stuck, as an operator would."""
        for trigger in self.run.triggers.iterdir():
            trigger.unlink()
        self.run.heal()
        if self.run.is_driven:
            self.run.kill()
        step = self.run.last_step()
        self.run.resume()
        self._wait_for_step(step + 1)


def one_run(name: str, options: argparse.Namespace, results: Results, has_own_mounts: bool) -> None:
    scenario: Scenario = scenario_of(name)
    folder = Path(options.folder).resolve() / f"{name}-{options.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    disk = Disk(folder) if has_own_mounts else None
    memory = Memory(folder) if has_own_mounts and Memory.is_possible() else None
    if disk:
        disk.mount()
    run = ChaosRun(folder, disk, memory)
    try:
        if scenario.num_nodes:
            run.cluster = Cluster(scenario.num_nodes, run.environment)
        campaign = Campaign(name, run, results, options)
        overrides = overrides_of(scenario, options.config, options.overrides)
        if "episodes" in scenario.words:
            overrides.append(f"episodes.writable_paths=['{run.triggers.resolve()}']")
        campaign.begin(options.config, overrides)
        campaign.inject_all(options.faults)
        campaign.end()
        from grpo_ray.tools.audit.audit import audit  # it imports torch, which takes a while

        report = audit(run.run)
        print(f"{name}, seed {options.seed}: {report}", flush=True)
        counts = report.num_steps, report.num_groups, report.num_completions
        results.add(Audited(name, options.seed, commit(), *counts, tuple(report.problems)))
    finally:
        run.end()
        if run.cluster:
            run.cluster.stop()
        if disk:
            disk.unmount()


def main() -> int:
    options = _options()
    has_own_mounts = in_own_namespace(sys.argv)
    if has_own_mounts:
        own_shared_memory()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the run is ended, too
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` ignores it, also for the driver
    results = Results(Path(options.folder))
    for name in options.scenarios.split(",") if options.faults else []:
        if not results.is_audited(name, options.seed):
            one_run(name, options, results, has_own_mounts)
    text, is_good = table(results)
    print(text)
    return 0 if is_good else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("--scenarios", default="torch", help=f"some of {','.join(SCENARIOS)}")
    parser.add_argument("--faults", type=int, default=20, help="faults per run")
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults")
    parser.add_argument("--kinds", default="", help=f"some of {','.join(FAULTS)}; default: all")
    parser.add_argument("--pause", type=float, default=3.0, help="longest wait before a fault, in seconds")
    parser.add_argument("--folder", default="runs/chaos", help="folder of the runs and their results")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_intermixed_args()
    for option, given, known in (("kinds", options.kinds, FAULTS), ("scenarios", options.scenarios, SCENARIOS)):
        unknown = set(filter(None, given.replace("+", ",").split(","))) - set(known)
        if unknown:
            parser.error(f"--{option}: unknown: {', '.join(sorted(unknown))}; choose from {', '.join(known)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
