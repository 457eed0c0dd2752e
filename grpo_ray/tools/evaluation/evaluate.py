"""`grpo-ray evaluate`: from the options to the folder of results."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from grpo_ray.cluster import local
from grpo_ray.config import Config
from grpo_ray.core.clients import ServingActors
from grpo_ray.core.context import PreparedServing
from grpo_ray.errors import RunError, all_of, shown_plainly
from grpo_ray.learning.model_files import is_local as is_local_model
from grpo_ray.records.evaluation_summary import EvaluationSummary
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.run.machine import check_machine
from grpo_ray.run.preparation import check_files, prepare_serving
from grpo_ray.run.signals import Interrupted, signals_answered, signals_noticed
from grpo_ray.tasks import load_validation
from grpo_ray.tools.drawing.terminal_curve import terminal_curve
from grpo_ray.tools.evaluation.evaluation_plan import EvaluationPlan, plan_evaluation
from grpo_ray.tools.evaluation.results import plot_curve, read_summary, summary_table, write_curve
from grpo_ray.tools.evaluation.sampling import EvaluationConsole, Evaluator
from grpo_ray.tools.evaluation.subject import Weights
from grpo_ray.tools.look import EvaluationOptions
from grpo_ray.types import StartingModel
from grpo_ray.watch.run_log import RunLog

StoppableBy = Callable[[Callable[[], object]], None]


def evaluate(options: EvaluationOptions, stoppable_by: StoppableBy = lambda stop: None) -> Path:
    """Sample, grade and summarise; return the folder of results.

    Args:
        stoppable_by: given a function that stops the evaluation as Ctrl-C does, which any thread may call.

    Raises:
        ConfigError, RunError: the options, the files, the model, the cluster or an actor.
        Interrupted: Ctrl-C or SIGTERM; the responses so far are kept, and the message says how to resume.
    """
    plan = plan_evaluation(options)
    _, examples, _ = all_of(
        lambda: plan.folder.check(plan.definition, is_partial=True),
        lambda: load_validation(plan.config.task, plan.config.run.seed, plan.limit),
        lambda: check_machine(plan.config, plan.is_local),
    )
    with EvaluationConsole() as console:
        for notice in plan.subject.notices:
            console.warning(notice)
        config = _with_model(plan, console)
        with shown_plainly():
            prepared = prepare_serving(config, check_files(config, examples))
        for notice in prepared.notices:
            console.warning(notice)
        definition = plan.definition_with(prepared.validation, examples.validation)
        plan.folder.check(definition)
        left = [w for w in plan.subject.weights if read_summary(plan.folder_of(w)) is None]
        if left:
            _print_plan(plan, config, prepared, console)
            with plan.folder.lock():
                plan.folder.claim(definition)
                with _resumable(plan):
                    _sample(plan, config, left, prepared, console, stoppable_by)
        summaries = [s for w in plan.subject.weights if (s := read_summary(plan.folder_of(w))) is not None]
        if not summaries:
            raise RunError("nothing was evaluated: none of the weights could be loaded")
        _conclude(plan, summaries, console)
    return plan.folder.path


def _with_model(plan: EvaluationPlan, console: EvaluationConsole) -> Config:
    """Return the configuration with the model that the Generators load first: the first weights, or a base."""
    first = plan.subject.weights[0]
    path = plan.config.model.path if first.folder is None or first.is_adapter else str(first.folder)
    if path is None:
        from grpo_ray.run.tiny_model import tiny_model_folder

        with shown_plainly():
            console.status("preparing the model")
            path = str(tiny_model_folder(plan.model_config, console.warmup))
    return plan.config.changed(model={"path": path, "tiny": None})


@contextlib.contextmanager
def _resumable(plan: EvaluationPlan) -> Iterator[None]:
    """Add to every error where the responses so far are, and how to resume."""
    kept = f"the responses so far are in {plan.folder.path}; resume with: {plan.command}"
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(kept) from None
    except (RunError, OSError) as error:  # OSError: a full disk
        raise RunError(f"{error}\n{kept}") from error


def _sample(
    plan: EvaluationPlan, config: Config, left: Sequence[Weights], prepared: PreparedServing,
    console: EvaluationConsole, stoppable_by: StoppableBy,
) -> None:  # fmt: skip
    async def until_stopped() -> None:
        with contextlib.closing(RunLog(RunDirectory(plan.folder.path), console)) as log:
            evaluator = Evaluator(plan, config, prepared, actors, console, log)
            sampling = asyncio.ensure_future(evaluator.run(left))
            with signals_noticed(lambda number: sampling.cancel()) as stop:
                stoppable_by(stop)
                await sampling

    with signals_answered(), _served(plan, config, prepared.model, console) as actors:
        try:
            asyncio.run(until_stopped())
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


@contextlib.contextmanager
def _served(
    plan: EvaluationPlan, config: Config, model: StartingModel, console: EvaluationConsole
) -> Iterator[ServingActors]:
    """Yield the actors, in this process or on Ray; end them however the block is left."""
    if plan.is_local:
        with local.threads_kept(), local.LocalServing(config, model, plan.folder.path) as here:
            yield here
        return
    console.status("starting Ray")
    from grpo_ray.cluster import session
    from grpo_ray.cluster.hosting import ServingGroup

    assert config.model.path is not None
    with (
        session.connected(needs_hub=not is_local_model(config.model.path)),
        session.placed(config) as placement,
        ServingGroup(placement, config, model, plan.folder.path.resolve()) as actors,
    ):
        yield actors


def _conclude(plan: EvaluationPlan, summaries: Sequence[EvaluationSummary], console: EvaluationConsole) -> None:
    """Print the table of the last weights and, of several, write the curve."""
    folder, last = plan.folder.path, summaries[-1]
    console.print(summary_table(last))
    if last.num_errors:
        console.warning(f"{last.num_errors} responses could not be graded, and count as wrong")
    if len(plan.subject.weights) == 1:
        console.print(f"\n{folder}  (summary.json, examples.parquet, examples.md)")
        return
    write_curve(summaries, folder / "curve.csv")
    plot_curve(summaries, f"{plan.subject.name}: {plan.config.task.kind}", folder / "accuracy.png")
    points = [(summary.step, summary.accuracy) for summary in summaries]
    console.print(f"\n{terminal_curve(points, title='accuracy of the checkpoints')}")
    console.print(f"\n{folder}  (curve.csv, accuracy.png, one folder per checkpoint)")


def _print_plan(
    plan: EvaluationPlan, config: Config, prepared: PreparedServing, console: EvaluationConsole
) -> None:
    task, generator, sampling = config.task, config.generator, config.sampling
    prompt, reward = (getattr(task, name, "of each part") for name in ("prompt", "reward"))
    graded = "episodes" if config.has_only_episodes else f"prompt {prompt}, reward {reward}"
    device = f"{generator.num_gpus} GPU" if generator.num_gpus else "CPU"
    how = "greedy" if sampling.temperature == 0 else f"temperature {sampling.temperature:g}"
    top_p = f", top_p {sampling.top_p:g}" if sampling.top_p < 1 else ""
    stop = f", up to {' or '.join(map(repr, sampling.stop))}" if sampling.stop else ""
    console.print(
        f"{plan.subject.name}: {len(prepared.validation):,} prompts of {task.kind} x {plan.num_samples}, "
        f"{graded}\n{how}{top_p}, {sampling.min_tokens} to {sampling.max_tokens} tokens{stop}, "
        f"{generator.num_generators} x {generator.engine} on {device}"
    )
