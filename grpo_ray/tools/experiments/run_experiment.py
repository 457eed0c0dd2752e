"""An experiment from its definition to its table and pictures."""

import json
from collections.abc import Sequence
from pathlib import Path

from grpo_ray.telemetry.durable import replacing
from grpo_ray.telemetry.run_lock import locked
from grpo_ray.tools.experiments.definition_file import keep_definition
from grpo_ray.tools.experiments.experiment import Experiment
from grpo_ray.tools.experiments.launch import PROGRAM, Ended, Launcher
from grpo_ray.tools.experiments.outcome import Outcome, read_outcome
from grpo_ray.tools.experiments.plan import Plan, PlannedRun, make_plan
from grpo_ray.tools.experiments.resources import default_jobs, describe_machine
from grpo_ray.tools.experiments.summary import write_summary
from grpo_ray.tools.experiments.table import by_variant, markdown_table, write_csv

INTERRUPTED = 130


def run_experiment(
    experiment: Experiment,
    base: str,
    overrides: Sequence[str],
    num_seeds: int,
    output: str,
    jobs: int | None,
    command: str,
    program: Sequence[str] = PROGRAM,
) -> bool:
    """Run what has not been run, and write what came of it all; whether no run failed.

    Args:
        command: what the user typed, to be typed again.

    Raises:
        ConfigError: a variant's configuration, before anything starts.
        RunError: the folder is another experiment's, or is in use.
        KeyboardInterrupt: a signal; all runs have been ended.
    """
    plan = make_plan(experiment, base, overrides, num_seeds, output)
    plan.folder.mkdir(parents=True, exist_ok=True)
    with locked(plan.folder / ".lock", plan.folder):
        keep_definition(plan)
        jobs = jobs or default_jobs([run.config for run in plan.runs])
        outcomes = _run(plan, jobs, program, command)
        write_report(plan, outcomes, command, jobs)
    print(f"\n{(plan.folder / 'summary.md').read_text(encoding='utf-8')}\nAll of it is in {plan.folder}")
    failed = [outcome for outcome in outcomes if not outcome.is_over]
    if failed:
        print(f"{len(failed)} runs failed, and are tried again by: {command}")
    return not failed


def _run(plan: Plan, jobs: int, program: Sequence[str], command: str) -> list[Outcome]:
    """Every run's outcome; those that are over already are only read."""
    outcomes = {run.name: read_outcome(run) for run in plan.runs}
    progress = _Progress(plan, outcomes)
    left = [run for run in plan.runs if not outcomes[run.name].is_over]
    print(
        f"{plan.experiment.name}: {len(left)} of {len(plan.runs)} runs to do, {jobs} at a time; {plan.folder}"
    )
    launcher = Launcher(plan.base, jobs, progress.started, progress.ended, program)
    if not launcher.run_all(left):
        raise KeyboardInterrupt(f"go on with: {command}")
    return list(outcomes.values())


class _Progress:
    """A line a run on the terminal, and `results.json`."""

    def __init__(self, plan: Plan, outcomes: dict[str, Outcome]) -> None:
        self._path, self._outcomes = plan.folder / "results.json", outcomes
        self._num_done = sum(outcome.is_over for outcome in outcomes.values())
        self._write()

    def started(self, run: PlannedRun) -> None:
        has_begun = "goes on" if self._outcomes[run.name].rows else "started"
        print(f"{run.name}: {has_begun} (log: {run.log})", flush=True)

    def ended(self, ended: Ended) -> None:
        is_stopped = ended.status == INTERRUPTED
        outcome = read_outcome(ended.run, None if is_stopped else ended.error)
        self._outcomes[ended.run.name] = outcome
        self._num_done += outcome.is_over
        words: str = "stopped" if is_stopped else outcome.status
        words += f" ({outcome.reason})" if outcome.reason else ""
        reward = f", validation reward {outcome.final:.3f}" if outcome.final is not None else ""
        count = f"{self._num_done} of {len(self._outcomes)}"
        print(f"{ended.run.name}: {words} after {ended.seconds:.0f} s{reward}  [{count}]", flush=True)
        self._write()

    def _write(self) -> None:
        rows = {
            name: {"status": outcome.status, "reason": outcome.reason, "final_reward": outcome.final}
            for name, outcome in self._outcomes.items()
        }
        with replacing(self._path) as partial:
            partial.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def write_report(plan: Plan, outcomes: Sequence[Outcome], command: str, jobs: int) -> None:
    """The table, the pictures and the summary."""
    # Here, because nothing before needs matplotlib.
    from grpo_ray.tools.experiments.curves import plot_metrics, plot_validation_reward
    from grpo_ray.tools.experiments.timing import plot_timing

    experiment, folder = plan.experiment, plan.folder
    results = by_variant(experiment.variants, outcomes)
    write_csv(folder / "table.csv", results, experiment.metrics)
    _write(folder / "table.md", markdown_table(results, experiment.metrics))
    title = experiment.title
    plot_validation_reward(results, title, folder / "validation_reward.png")
    plot_metrics(results, experiment.metrics, title, folder / "metrics.png")
    plot_timing(results, title, folder / "timing.png")
    _write(folder / "summary.md", write_summary(experiment, results, command, describe_machine(), jobs))


def _write(path: Path, text: str) -> None:
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")
