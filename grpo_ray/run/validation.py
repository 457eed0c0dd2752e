"""Validation while training: every few steps, all validation prompts, at the version that was published."""

import asyncio
from collections.abc import Callable
from typing import Any

from grpo_ray.config import Config
from grpo_ray.errors import RunError
from grpo_ray.run.generator_pool import Rollouts
from grpo_ray.run.preflight import Prepared
from grpo_ray.telemetry.evaluation_summary import EvaluationSummary
from grpo_ray.telemetry.run_files import read_metrics
from grpo_ray.telemetry.run_log import Metrics, RunLog
from grpo_ray.telemetry.stage_clock import StageClock
from grpo_ray.telemetry.validation_files import summarise_groups, write_evaluation
from grpo_ray.types import PromptItem, ScoredGroup


class Validation:
    def __init__(
        self,
        config: Config,
        prepared: Prepared,
        rollouts: Rollouts,
        actors: Any,
        log: RunLog,
        clock: StageClock,
    ) -> None:
        self._config, self._items, self._actors, self._log = config, prepared.validation, actors, log
        self._rollouts, self._clock = rollouts, clock
        self._unwritten: list[Callable[[], None]] = []

    def is_due(self, step: int) -> bool:
        return step % self._config.evaluation.every_num_steps == 0 or step == self._config.algorithm.num_steps

    async def evaluate(self, step: int) -> Metrics:
        """The step's validation; its metrics alone when it was done before the run was interrupted.

        Raises:
            RunError: not one prompt could be sampled.
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
        scored = await self._rollouts.sample(item, num_samples, f"validation at step {step}")
        return None if scored is None else await self._actors.fetch(scored)

    def write(self) -> None:
        """Write what could not be written before, in order."""
        error = None
        while self._unwritten and error is None:
            try:
                self._unwritten[0]()
                self._unwritten.pop(0)
            except OSError as full:
                error = f"{len(self._unwritten)} evaluations could not be written yet: {full}"
        self._log.warning("evaluations", error)
