"""Validation during training: every N steps, all validation prompts, at the published version."""

import asyncio
from collections.abc import Callable, Sequence

from grpo_ray.errors import RunError
from grpo_ray.run.context import RunContext
from grpo_ray.run.generator_pool import GeneratorPool
from grpo_ray.telemetry.evaluation_summary import EvaluationSummary
from grpo_ray.telemetry.run_files import read_metrics
from grpo_ray.telemetry.run_log import Metrics
from grpo_ray.telemetry.validation_files import summarise_groups, write_evaluation
from grpo_ray.types import PromptItem, ScoredGroup


class Validation:
    """The validation prompts, sampled and graded with the run's own Generators and Scorer."""

    def __init__(self, context: RunContext, items: Sequence[PromptItem], pool: GeneratorPool) -> None:
        self._config, self._actors = context.config, context.actors
        self._log, self._clock = context.log, context.clock
        self._items, self._pool = items, pool
        self._unwritten: list[Callable[[], None]] = []

    def is_due(self, step: int) -> bool:
        return step % self._config.evaluation.every_num_steps == 0 or step == self._config.algorithm.num_steps

    async def evaluate(self, step: int) -> Metrics:
        """Validate the policy after `step`, or read the metrics if that was done before an interruption.

        Raises:
            RunError: no prompt could be sampled.
        """
        path = self._log.run.evaluations_summary_path
        for row in read_metrics(path) if path.exists() else []:
            if row["step"] == step:
                return EvaluationSummary(**row).metrics
        with self._clock.stage("evaluate", f"step {step}") as duration:
            sampled = await asyncio.gather(*(self._sample(step, item) for item in self._items))
        groups = [group for group in sampled if group is not None]
        if not groups:
            raise RunError(
                f"no validation prompt could be sampled at step {step}; see {self._log.run.events_path}"
            )
        summary = summarise_groups(step, groups)
        self._unwritten.append(lambda: write_evaluation(self._log.run.evaluations, summary, groups))
        self.write()
        self._log.evaluation(summary, groups)
        return {**summary.metrics, "timing/evaluate_s": duration.seconds}

    async def _sample(self, step: int, item: PromptItem) -> ScoredGroup | None:
        num_samples = self._config.evaluation.samples_per_prompt
        scored = await self._pool.sample(item, num_samples, f"validation at step {step}")
        return None if scored is None else await self._actors.fetch(scored)

    def write(self) -> None:
        """Write the evaluations that could not be written before, in order."""
        error = None
        while self._unwritten and error is None:
            try:
                self._unwritten[0]()
                self._unwritten.pop(0)
            except OSError as full:
                error = f"{len(self._unwritten)} evaluations could not be written yet: {full}"
        self._log.warning("evaluations", error)
