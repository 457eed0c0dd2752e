"""Sampling: every policy's responses to a plan's prompts, written to their folders."""

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

from grpo_ray.config import Config
from grpo_ray.core.context import PreparedServing
from grpo_ray.core.pool import training_settings
from grpo_ray.errors import RunError
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.tools.evaluation.console import EvaluationConsole
from grpo_ray.tools.evaluation.evaluation_folder import write_results
from grpo_ray.tools.evaluation.evaluation_plan import EvaluationPlan
from grpo_ray.tools.evaluation.evaluator import Evaluator, PuttingActors
from grpo_ray.tools.evaluation.responses import ResponseFiles
from grpo_ray.tools.evaluation.subject import Weights
from grpo_ray.types import ScoredGroup
from grpo_ray.watch.run_log import RunLog


async def sample(
    plan: EvaluationPlan, config: Config, left: Sequence[Weights], prepared: PreparedServing,
    actors: PuttingActors, console: EvaluationConsole,
) -> None:  # fmt: skip
    """Sample with the weights in `left`, one after another; the actors start with the plan's first weights, or
    with the base of an adapter.

    Later weights that cannot be loaded are skipped.

    Raises:
        RunError: the error that ended it; the responses so far are on disk.
    """
    settings = replace(
        training_settings(config.sampling, prepared.model.end_token_ids),
        temperature=plan.temperature,
        top_p=plan.top_p,
    )
    console.status("starting the actors")
    log = RunLog(RunDirectory(plan.folder.path), console)
    evaluator = Evaluator(config, settings, actors, log)

    async def work() -> None:
        for weights in left:
            if weights != plan.subject.weights[0] or weights.is_adapter:
                try:
                    await evaluator.load(str(weights.folder))
                except ValueError as error:
                    console.warning(f"{weights.folder} is skipped: {error}")
                    continue
            await _sample_one(plan, weights, prepared, evaluator, console)

    with closing(log):
        await evaluator.run(work)


async def _sample_one(
    plan: EvaluationPlan,
    weights: Weights,
    prepared: PreparedServing,
    evaluator: Evaluator,
    console: EvaluationConsole,
) -> None:
    folder, items = plan.folder_of(weights), prepared.validation
    folder.mkdir(exist_ok=True)
    files = ResponseFiles(folder, [item.group_id for item in items])
    console.begin(folder.name, len(items), len(files.done))
    started, num_tokens = time.perf_counter(), 0

    def take(group: ScoredGroup) -> None:
        nonlocal num_tokens
        num_tokens += sum(completion.num_tokens for completion in group.rollout.completions)
        files.add(group)
        console.advance(group)

    waiting = [item for item in items if item.group_id not in files.done]
    try:
        failed = await evaluator.evaluate(waiting, plan.num_samples, take)
    finally:
        files.flush()
    if len(failed) == len(items):
        raise RunError(f"no prompt could be sampled; see {plan.folder.path / 'events.jsonl'}")
    if failed:
        console.warning(f"{len(failed)} prompts failed every attempt and are left out; see summary.json")
    facts = {
        **plan.definition,
        "weights": str(weights.folder or plan.config.model.path or "tiny"),
        "not_sampled": failed,  # ids of prompts that are not in the results
        "seconds": time.perf_counter() - started,  # of this start alone
        "sampled_tokens": num_tokens,  # of this start alone
    }
    write_results(folder, files.join(), weights.step, facts)
    files.remove_parts()
