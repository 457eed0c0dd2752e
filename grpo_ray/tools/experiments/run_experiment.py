"""`grpo-ray experiment`: from the definition to the table and plots."""

import shutil
from collections.abc import Sequence

from grpo_ray.config.loading import find_config
from grpo_ray.errors import INTERRUPTED
from grpo_ray.records.durable import replacing, write_csv, write_text
from grpo_ray.records.resumable_folder import ResumableFolder
from grpo_ray.records.visible_text import print_visible, visible
from grpo_ray.run.machine import default_jobs, describe_machine
from grpo_ray.tools.experiments.experiment import Experiment
from grpo_ray.tools.experiments.experiment_plan import (
    ExperimentPlan,
    PlannedRun,
    definition_of,
    differences,
    plan_experiment,
)
from grpo_ray.tools.experiments.launch import PROGRAM, run_all
from grpo_ray.tools.experiments.outcome import ExperimentOutcome, read_outcome
from grpo_ray.tools.experiments.table import by_variant, comparison_table, csv_row, write_summary


def run_experiment(
    experiment: Experiment, base: str, overrides: Sequence[str], num_seeds: int, output: str, jobs: int | None,
    command: str, program: Sequence[str] = PROGRAM,
) -> bool:  # fmt: skip
    """Run what is not done yet and write the results of all runs; return whether every run succeeded.

    The `command` as typed resumes it.

    Raises:
        ConfigError: a variant's configuration is wrong; nothing was started.
        RunError: the folder belongs to another experiment, or is in use.
        KeyboardInterrupt: a signal came; all runs have ended.
    """
    plan = plan_experiment(experiment, base, overrides, num_seeds, output)
    remedy = "give another --output or --name"
    folder = ResumableFolder(plan.folder, "experiment.json", "experiment", remedy, differences)
    definition = definition_of(plan)
    folder.check(definition)
    with folder.lock():
        folder.claim(definition)
        with replacing(plan.kept_base) as partial:
            shutil.copyfile(find_config(plan.base), partial)
        jobs = jobs or default_jobs([run.config for run in plan.runs])
        outcomes = _run(plan, jobs, program, command)
        write_report(plan, outcomes, command, jobs)
    summary = (plan.folder / "summary.md").read_text(encoding="utf-8")
    print_visible(f"\n{summary}\nEverything is in {plan.folder}")
    failed = [outcome for outcome in outcomes if not outcome.is_over]
    if failed:
        print(f"{len(failed)} runs failed; retry them with: {command}")
    return not failed


def _run(plan: ExperimentPlan, jobs: int, program: Sequence[str], command: str) -> list[ExperimentOutcome]:
    """Run what is left and return every run's outcome; print a line per event of a run."""
    outcomes = {run.name: read_outcome(run) for run in plan.runs}
    left = [run for run in plan.runs if not outcomes[run.name].is_over]

    def started(run: PlannedRun) -> None:
        verb = "resumed" if outcomes[run.name].table.num_rows else "started"
        print(f"{run.name}: {verb} (log: {run.log})", flush=True)

    def ended(run: PlannedRun, status: int, seconds: float, error: str | None) -> None:
        is_stopped = status == INTERRUPTED
        outcome = outcomes[run.name] = read_outcome(run, None if is_stopped else error)
        words: str = "stopped" if is_stopped else outcome.status
        words += f" ({outcome.reason})" if outcome.reason else ""
        reward = f", validation reward {outcome.final:.3f}" if outcome.final is not None else ""
        count = f"{sum(each.is_over for each in outcomes.values())} of {len(outcomes)}"
        print(visible(f"{run.name}: {words} after {seconds:.0f} s{reward}  [{count}]"), flush=True)

    to_do = f"{len(left)} of {len(plan.runs)} runs to do"
    print(f"{plan.experiment.name}: {to_do}, {jobs} at a time; {plan.folder}")
    if not run_all(left, str(plan.kept_base), jobs, started, ended, program):
        raise KeyboardInterrupt(f"resume with: {command}")
    return list(outcomes.values())


def write_report(plan: ExperimentPlan, outcomes: Sequence[ExperimentOutcome], command: str, jobs: int) -> None:
    """Write the table, the plots and the summary."""
    # Imported here, because nothing before needs matplotlib.
    from grpo_ray.tools.experiments.curves import plot_metrics, plot_timing, plot_validation_reward

    experiment, folder = plan.experiment, plan.folder
    results = by_variant(experiment.variants, outcomes)
    write_csv(folder / "table.csv", [csv_row(result, experiment.metrics) for result in results])
    write_text(folder / "table.md", comparison_table(results, experiment.metrics))
    title = experiment.title
    plot_validation_reward(results, title, folder / "validation_reward.png")
    if experiment.metrics:
        plot_metrics(results, experiment.metrics, title, folder / "metrics.png")
    plot_timing(results, title, folder / "timing.png")
    if experiment.draw is not None:
        experiment.draw(results, title, folder)
    write_text(folder / "summary.md", write_summary(experiment, results, command, describe_machine(), jobs))
