"""`grpo-ray evaluate`: from what was typed to the folder of results."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from grpo_ray import cluster
from grpo_ray.config import Config
from grpo_ray.errors import RunError, all_of, shown_plainly
from grpo_ray.evaluation.console import EvaluationConsole
from grpo_ray.evaluation.curve import plot_curve, write_curve
from grpo_ray.evaluation.folder import check_folder, claim, read_summary
from grpo_ray.evaluation.plan import EvaluationOptions, Plan, make_plan
from grpo_ray.evaluation.readable import summary_table
from grpo_ray.evaluation.sampling import sample
from grpo_ray.evaluation.subject import Weights
from grpo_ray.evaluation.summary import EvaluationSummary
from grpo_ray.hosting import serving
from grpo_ray.policy.loading import is_local
from grpo_ray.preflight import Prepared, check_files, prepare
from grpo_ray.report.terminal_curve import terminal_curve
from grpo_ray.tasks import load_examples
from grpo_ray.telemetry.run_lock import locked
from grpo_ray.training import Interrupted, sigterm_interrupts
from grpo_ray.types import PromptItem


def evaluate(options: EvaluationOptions) -> Path:
    """Sample, grade and sum up; returns the folder.

    Raises:
        ConfigError, RunError: what was typed, the files, the model, the cluster or an actor.
        Interrupted: Ctrl-C or SIGTERM; what there is is kept, and the message says how to go on.
    """
    plan = make_plan(options)
    all_of(
        lambda: check_folder(plan.folder, plan.asked),
        lambda: load_examples(plan.config.task, plan.config.run.seed),
        lambda: cluster.check_machine(plan.config),
    )
    with EvaluationConsole() as console:
        for notice in plan.subject.notices:
            console.trouble(notice)
        left = [w for w in plan.subject.weights if read_summary(plan.folder_of(w)) is None]
        if left:
            config = _with_model(plan, left[0], console)
            prepared = _prepare(config, plan.limit, console)
            _print_plan(plan, config, prepared, console)
            plan.folder.mkdir(parents=True, exist_ok=True)
            with locked(plan.folder / ".lock", plan.folder):
                claim(plan.folder, plan.asked)
                _sample(plan, config, left, prepared, console)
        found = [read_summary(plan.folder_of(weights)) for weights in plan.subject.weights]
        _conclude(plan, [summary for summary in found if summary is not None], console)
    return plan.folder


def _with_model(plan: Plan, first: Weights, console: EvaluationConsole) -> Config:
    """The configuration with the folder of the weights that the Generators are to load at their start."""
    path = str(first.folder) if first.folder is not None else plan.config.model.path
    if path is None:
        from grpo_ray.policy.tiny import tiny_model_folder

        with shown_plainly():
            console.status("preparing the model")
            path = str(tiny_model_folder(plan.model_config, console.warmup))
    model = plan.config.model.model_copy(update={"path": path, "tiny": None})
    return plan.config.model_copy(update={"model": model})


def _prepare(config: Config, limit: int | None, console: EvaluationConsole) -> Prepared:
    """With the first prompts only, so many of each part of a mixture."""
    with shown_plainly():
        prepared = prepare(config, check_files(config))
    for notice in prepared.notices:
        console.trouble(notice)
    if limit is None:
        return prepared
    taken: Counter[str] = Counter()
    kept: list[PromptItem] = []
    for item in prepared.validation:
        taken[item.task] += 1
        if taken[item.task] <= limit:
            kept.append(item)
    return replace(prepared, validation=kept)


def _sample(
    plan: Plan, config: Config, left: Sequence[Weights], prepared: Prepared, console: EvaluationConsole
) -> None:
    assert config.model.path is not None
    console.status("starting Ray")
    model_path, logs = prepared.model_path, plan.folder.resolve() / "logs"
    kept = f"the responses so far are in {plan.folder}; go on with: {plan.command}"
    try:
        with cluster.connected(needs_hub=not is_local(config.model.path)), sigterm_interrupts():
            cluster.check_resources(config)
            with serving(config, model_path, prepared.max_model_len, logs) as actors:
                asyncio.run(sample(plan, config, left, prepared, actors, console))
    except KeyboardInterrupt:
        raise Interrupted(kept) from None
    except RunError as error:
        raise RunError(f"{error}\n{kept}") from error


def _conclude(plan: Plan, summaries: Sequence[EvaluationSummary], console: EvaluationConsole) -> None:
    """The last one's table, and the curve of several."""
    last = summaries[-1]
    console.print(summary_table(last))
    if last.num_errors:
        console.trouble(f"{last.num_errors} responses could not be graded, and count as not right")
    if len(summaries) == 1:
        console.print(f"\n{plan.folder}  (summary.json, examples.parquet, examples.md)")
        return
    write_curve(summaries, plan.folder / "curve.csv")
    plot_curve(summaries, f"{plan.subject.name}: {plan.config.task.kind}", plan.folder / "accuracy.png")
    points = [(summary.step, summary.accuracy) for summary in summaries]
    console.print(f"\n{terminal_curve(points, title='accuracy of the checkpoints')}")
    console.print(f"\n{plan.folder}  (curve.csv, accuracy.png, a folder a checkpoint)")


def _print_plan(plan: Plan, config: Config, prepared: Prepared, console: EvaluationConsole) -> None:
    task, generator = config.task, config.generator
    prompt, reward = (getattr(task, name, "of each part") for name in ("prompt", "reward"))
    how = "greedy" if plan.temperature == 0 else f"temperature {plan.temperature:g}"
    top_p = f", top_p {plan.top_p:g}" if plan.top_p < 1 else ""
    console.print(
        f"{plan.subject.name}: {len(prepared.validation):,} prompts of {task.kind} x {plan.num_samples}, "
        f"prompt {prompt}, reward {reward}\n{how}{top_p}, at most {config.sampling.max_tokens} tokens, "
        f"{generator.num_generators} x {generator.engine} on "
        f"{f'{generator.num_gpus} GPU' if generator.num_gpus else 'CPU'}"
    )
