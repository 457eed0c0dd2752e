"""Validation during training: every N steps, all validation prompts, at the published version."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from grpo_ray.core.context import RunContext
from grpo_ray.core.pool import GeneratorPool
from grpo_ray.errors import RunError
from grpo_ray.records.evaluation_summary import (
    EvaluationSummary,
    find_evaluation,
    summarise_groups,
    write_evaluation,
)
from grpo_ray.types import PromptItem, ScoredGroup
from grpo_ray.watch.batch_metrics import ungraded_in
from grpo_ray.watch.run_log import Metrics

MAX_UNWRITTEN = 8  # evaluations that wait with their responses for room on a disk


class Validation:
    """The validation prompts, sampled and graded with the run's own actors."""

    def __init__(self, context: RunContext, items: Sequence[PromptItem], pool: GeneratorPool) -> None:
        self._config, self._actors = context.config, context.actors
        self._log, self._clock = context.log, context.clock
        self._items, self._pool = items, pool
        self._restored_step = context.log.step  # its validation may have been written already
        self._has_graded = False  # a later outage of a grader does not end the run
        self._unwritten: deque[tuple[EvaluationSummary, list[ScoredGroup] | None]] = deque()

    def is_due(self, step: int) -> bool:
        return step % self._config.evaluation.every_num_steps == 0 or step == self._config.algorithm.num_steps

    async def evaluate(self, step: int) -> Metrics:
        """Validate the policy after `step`, or read the metrics if that was done before an interruption.

        Raises:
            RunError: no prompt could be sampled, or it is the first validation and no answer could be graded.
        """
        if step == self._restored_step:
            find = partial(find_evaluation, self._log.run.evaluations, step)
            if (found := await self._log.writer.run("summary.jsonl", find)) is not None:
                self._has_graded = True
                return found.metrics
        sample, num_samples = self._pool.sample_whole, self._config.evaluation.samples_per_prompt
        with self._clock.stage("evaluate", f"step {step}") as duration:
            samples = (sample(item, num_samples, f"validation at step {step}") for item in self._items)
            sampled = await asyncio.gather(*samples)
        groups = [group for group in sampled if group is not None]
        if not groups:
            raise RunError(f"no prompt could be sampled at step {step}; see {self._log.run.events_path}")
        if not self._has_graded:
            ungraded = ungraded_in(groups, with_late=False)  # at the start, engines may still be slow
            if ungraded is not None and ungraded.is_all:
                raise RunError(ungraded.refusal(f"in the validation at step {step}"))
            self._has_graded = True
        summary = await asyncio.to_thread(summarise_groups, step, groups)  # 100,000 prompts take many seconds
        summary = replace(summary, episodes=self._log.bounded(summary.episodes))
        self._unwritten.append((summary, groups))
        self.write()
        self._log.evaluation(summary, groups)
        return {**summary.metrics, "timing/evaluate_s": duration.seconds}

    def write(self) -> None:
        """Write the evaluations that are not written yet, in order and in the thread of the records."""
        if self._unwritten:
            self._log.writer.submit("an evaluation", self._write)

    def _write(self) -> None:
        error = None
        while self._unwritten and error is None:
            summary, groups = self._unwritten[0]
            try:
                note = write_evaluation(self._log.run.evaluations, summary, groups)
            except OSError as full:
                error = f"{len(self._unwritten)} evaluations could not be written yet: {full}"
                continue
            except Exception as mistake:  # it would come again
                note = f"the evaluation of step {summary.step} is not written: {mistake!r}"
            self._unwritten.popleft()
            if groups is None:
                text = f"the disk had no room for the responses of the validation at step {summary.step}"
                self._log.event("responses_lost", None, text, validation_step=summary.step)
            if note is not None:
                self._log.event("rollouts_changed", None, note)
        for number in range(len(self._unwritten) - MAX_UNWRITTEN):
            self._unwritten[number] = self._unwritten[number][0], None  # of the oldest only metrics are kept
        self._log.warning("evaluations", error)
