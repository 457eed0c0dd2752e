"""Sampling and grading of a task's prompts with every Generator, for one policy after another, into files."""

import asyncio
import math
import time
from collections.abc import Sequence

import torch

from grpo_ray.config import Config
from grpo_ray.core.clients import ServingActors
from grpo_ray.core.context import PreparedServing, ServingContext
from grpo_ray.core.pool import GeneratorPool, training_settings
from grpo_ray.core.stalls import StallWatch
from grpo_ray.core.starting import until_all_ready
from grpo_ray.core.sync import WeightSync
from grpo_ray.engines.base import EngineDied
from grpo_ray.errors import ActorDied, DataLost, RunError, Stalled, first_error
from grpo_ray.learning.adapters import served_weights
from grpo_ray.learning.hub_format import in_hub_format
from grpo_ray.records.evaluation_summary import outcomes_of
from grpo_ray.tools.evaluation.evaluation_plan import EvaluationPlan
from grpo_ray.tools.evaluation.responses import ResponseFiles
from grpo_ray.tools.evaluation.results import write_results
from grpo_ray.tools.evaluation.subject import Weights
from grpo_ray.tools.export.merge import checkpoint_policy
from grpo_ray.transfer.messages import Snapshot, WeightSnapshot
from grpo_ray.transfer.snapshot import pack_weights
from grpo_ray.types import ScoredGroup
from grpo_ray.watch.console import RunConsole
from grpo_ray.watch.event_loop import TasksAlongside
from grpo_ray.watch.open_calls import OpenCalls
from grpo_ray.watch.restarts import RestartBudget
from grpo_ray.watch.run_log import RunLog

SURPLUS = 1.25  # requests per running sequence of an engine, so that it never waits for the next


class EvaluationConsole(RunConsole):
    def __init__(self) -> None:
        super().__init__(num_steps=0)
        self._num_before = self._num_done = self._num_correct = self._num_responses = self._total = 0

    def begin(self, text: str, total: int, num_done: int) -> None:
        """Start a bar of `total` prompts, of which `num_done` are done already."""
        self._total, self._num_before, self._num_done = total, num_done, num_done
        self._num_correct = self._num_responses = 0
        self._progress.update(self._bar, description=text, total=total, completed=num_done, details="")
        if not self.console.is_terminal:
            self.print(f"{text}: {num_done} of {total} prompts are done")

    def advance(self, group: ScoredGroup) -> None:
        """Count one more prompt as done."""
        is_correct = outcomes_of([group]).is_correct
        self._num_done += 1
        self._num_correct += int(is_correct.sum())
        self._num_responses += is_correct.size
        accuracy = f"accuracy {self._num_correct / self._num_responses:.3f}"
        accuracy += " of those sampled now" if self._num_before else " so far"
        if self.console.is_terminal:
            self._progress.update(self._bar, completed=self._num_done, details=accuracy)
        elif self._num_done % max(1, self._total // 10) == 0 or self._num_done == self._total:
            self.print(f"{self._num_done:>6}/{self._total} prompts  {accuracy}")


class Evaluator:
    """A run's path from prompts to scored groups, including deaths and restarts, without a Learner.

    The actors start with the plan's first weights, or with the base of an adapter. Another policy's weights
    reach the Generators as a trained version would: by a weight sync, which a WeightSync here conducts.
    """

    def __init__(
        self, plan: EvaluationPlan, config: Config, prepared: PreparedServing, actors: ServingActors,
        console: EvaluationConsole, log: RunLog,
    ) -> None:  # fmt: skip
        self._plan, self._config, self._items = plan, config, prepared.validation
        self._actors, self._console, self._log = actors, console, log
        recovery = config.recovery
        self._calls = OpenCalls()
        budget = RestartBudget("recovery.max_restarts", recovery.max_restarts, recovery.restart_backoff_s)
        self._weight_sync = WeightSync(list(actors.generators.values()), config.weight_sync.phase_timeout_s)
        self._context = ServingContext(config, actors, self._calls, log)
        settings = training_settings(config.sampling, prepared.model.end_token_ids)
        self._pool = GeneratorPool(self._context, self._weight_sync, settings, budget)
        self._num_loaded = 0

    async def run(self, left: Sequence[Weights]) -> None:
        """Sample with each of the weights, once every actor is up; those that cannot be loaded are skipped.

        Raises:
            RunError: the error that ended it; the responses so far are on disk.
        """
        self._console.status("starting the actors")
        try:
            async with TasksAlongside() as tasks:
                self._pool.start(tasks)
                await until_all_ready(self._context, lambda actor: actor.ready())
                limit_s = self._config.recovery.stall_timeout_s
                tasks.create_task(StallWatch(self._calls, self._pool, self._log, limit_s).run())
                for weights in left:
                    try:
                        await self._load(weights)
                    except ValueError as unusable:
                        self._console.warning(f"{weights.folder} is skipped: {unusable}")
                        continue
                    await self._sample(weights)
        except BaseExceptionGroup as errors:
            error = first_error(errors)
            if isinstance(error, ActorDied | DataLost | EngineDied | Stalled):
                logs = self._log.run.logs
                raise RunError(f"{error}\nThe actors' output is in {logs}/") from error
            raise error from None

    async def _load(self, weights: Weights) -> None:
        """Load the weights into every Generator that does not start with them; one that fails is replaced.

        Raises:
            ValueError: the weights cannot be used; the Generators keep their current ones.
        """
        if weights == self._plan.subject.weights[0] and not weights.is_adapter:
            return
        snapshot = await asyncio.to_thread(_snapshot, self._config, weights, self._num_loaded + 1)
        self._num_loaded += 1
        report = await self._weight_sync.publish(self._num_loaded, Snapshot(self._actors.put(snapshot)))
        for number, error in report.failed.items():
            self._pool.fail(number, error)

    async def _sample(self, weights: Weights) -> None:
        """Sample and grade what is not in the weights' folder yet, and write the results."""
        plan, items = self._plan, self._items
        folder = plan.folder_of(weights)
        folder.mkdir(exist_ok=True)
        files = ResponseFiles(folder, [item.group_id for item in items])
        self._console.begin(folder.name, len(items), len(files.done))
        started, num_tokens = time.perf_counter(), 0
        left = [item for item in items if item.group_id not in files.done]
        waiting = iter(left)  # shared: each worker takes the next when it is free
        failed: list[int] = []

        async def work() -> None:
            nonlocal num_tokens
            for item in waiting:
                group = await self._pool.sample_whole(item, plan.num_samples, "evaluation")
                if group is None:
                    failed.append(item.group_id)
                    continue
                num_tokens += sum(completion.num_tokens for completion in group.rollout.completions)
                files.add(group)
                self._console.advance(group)

        generator = self._config.generator
        in_flight = generator.num_generators * math.ceil(SURPLUS * generator.max_num_seqs / plan.num_samples)
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(in_flight, len(left))):
                    tasks.create_task(work())
        finally:
            files.flush()
        if len(failed) == len(items):
            raise RunError(f"no prompt could be sampled; see {plan.folder.path / 'events.jsonl'}")
        if failed:
            text = f"{len(failed)} prompts failed every attempt and are left out; see summary.json"
            self._console.warning(text)
        facts = {
            **plan.definition,
            "weights": str(weights.folder or plan.config.model.path or "tiny"),
            "not_sampled": sorted(failed),  # ids of prompts that are not in the results
            "seconds": time.perf_counter() - started,  # of this start alone
            "sampled_tokens": num_tokens,  # of this start alone
        }
        write_results(folder, files.join(), weights.step, facts)
        files.remove_parts()


def _snapshot(config: Config, weights: Weights, version: int) -> WeightSnapshot:
    assert weights.folder is not None
    try:
        policy, _ = checkpoint_policy(config, weights.folder)
    except OSError as error:  # a run that is still training may have deleted it
        raise ValueError(f"{weights.folder} cannot be read: {error}") from error
    dtype = getattr(torch, config.model.dtype)
    return pack_weights(in_hub_format(policy, served_weights(policy)), version, dtype)
