"""The controller: one run from the first evaluation to the last. It reads top to bottom.

    _produce:  admission -> Generator -> Scorer -> TrajectoryBuffer      (all groups at once)
    _train:    TrajectoryBuffer -> Learner -> snapshot                   (one batch after another)
    _publish:  snapshot -> WeightSync -> Generators, then admission opens (overlaps the next _train)

It holds references and small facts, never tokens; evaluations, which are shown and filed, come here whole.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any, Protocol

from grpo_ray.actors.staleness import admission_limit, oldest_allowed
from grpo_ray.cluster import Actors
from grpo_ray.config import Config
from grpo_ray.evaluation import EvaluationSummary, summarise, write_evaluation
from grpo_ray.preflight import Prepared, sampling_settings
from grpo_ray.telemetry.run_files import MetricsLog, RunDirectory
from grpo_ray.types import BatchFacts, GeneratorStats, PromptItem, ScoredGroup, StepReport, SyncReport

Metrics = dict[str, float]


class Display(Protocol):
    """What the controller tells a person while the run goes on."""

    def status(self, text: str) -> None: ...
    def step(self, step: int, metrics: Metrics) -> None: ...
    def evaluation(self, summary: EvaluationSummary) -> None: ...


class Controller:
    def __init__(
        self, config: Config, prepared: Prepared, actors: Actors, run: RunDirectory, display: Display
    ) -> None:
        self._config, self._prepared, self._actors, self._display = config, prepared, actors, display
        self._ledger = prepared.ledger
        self._run = run
        self._metrics = MetricsLog(run.metrics_path)
        self._num_running = dict.fromkeys(actors.generators, 0)
        self._num_finished = 0  # groups that reached the buffer
        self._group_finished = asyncio.Condition()
        self._last_line_at = 0.0
        self._trained_s = 0.0  # the Learner's seconds since the last step's line
        self.evaluations: dict[int, list[ScoredGroup]] = {}

    async def run(self) -> None:
        """Train `num_steps` steps; raises the first actor's error."""
        self._display.status("starting the actors")
        await self._until_ready()
        self._display.status("evaluating the initial policy")
        await self._evaluate(step=0)
        try:
            async with asyncio.TaskGroup() as tasks:
                producer = tasks.create_task(self._produce(tasks))
                await self._train(tasks)
                producer.cancel()
            checkpoint = self._run.checkpoint_path(self._config.algorithm.num_steps)
            await self._actors.learner.save.remote(checkpoint.resolve())
        except BaseExceptionGroup as errors:
            raise _first(errors) from None

    async def _until_ready(self, notice_s: float = 60.0) -> None:
        """Wait for every actor; say which are not up when it takes long, as on a busy cluster."""
        waits = {asyncio.ensure_future(a.ready.remote()): name for name, a in self._actors.by_name().items()}
        pending = set(waits)
        while pending:
            done, pending = await asyncio.wait(pending, timeout=notice_s, return_when=asyncio.FIRST_EXCEPTION)
            for ready in done:
                ready.result()
            if pending:
                names = ", ".join(sorted(waits[ready] for ready in pending))
                self._display.status(f"still waiting for {names} (is the cluster busy? see {self._run.logs})")

    # Producing groups

    async def _produce(self, tasks: asyncio.TaskGroup) -> None:
        """Dispatch prompts as admission allows; the last steps' batches need no successors."""
        algorithm = self._config.algorithm
        total = algorithm.num_steps * algorithm.prompts_per_step
        while self._ledger.next_group_id < total:
            above = self._ledger.next_group_id
            limit = await self._actors.weight_sync.admission_limit.remote(above)
            for item in self._ledger.take(min(limit, total) - above):
                tasks.create_task(self._rollout(item))

    async def _rollout(self, item: PromptItem) -> None:
        """One group: sampled, scored, put into the buffer; only references pass through here."""
        with self._sampling(item, self._config.algorithm.samples_per_prompt) as group:
            scored = self._actors.scorer.score.remote(group)
            await self._actors.buffer.put.remote(scored)
        async with self._group_finished:
            self._num_finished += 1
            self._group_finished.notify_all()

    @contextlib.contextmanager
    def _sampling(self, item: PromptItem, num_samples: int) -> Iterator[Any]:
        """A reference to the group that the least busy Generator samples, which counts as busy meanwhile."""
        name = min(self._num_running, key=lambda name: self._num_running[name])
        self._num_running[name] += 1
        try:
            settings = sampling_settings(self._config, self._prepared.end_token_ids, num_samples)
            yield self._actors.generators[name].generate.remote(item, settings)
        finally:
            self._num_running[name] -= 1

    # Training

    async def _train(self, tasks: asyncio.TaskGroup) -> None:
        published: asyncio.Task[None] | None = None
        await self._take_stats()  # the evaluation's
        self._last_line_at = time.perf_counter()
        for step in range(self._config.algorithm.num_steps):
            batch, metrics = await self._next_batch(step)
            report: StepReport = await self._actors.learner.train_step.remote(batch)
            self._trained_s += report.metrics["timing/train_s"]
            # The Learner's calls run in order: the next step starts once the snapshot has been copied.
            snapshot = self._actors.learner.snapshot.remote()
            if published is not None:
                await published
            metrics |= report.metrics
            published = tasks.create_task(self._publish(report.version, snapshot, metrics))
        if published is not None:
            await published

    async def _next_batch(self, step: int) -> tuple[Any, Metrics]:
        """A reference to the batch of `step`, and its facts; too old groups are sampled again."""
        started, rejected = time.perf_counter(), 0
        oldest = oldest_allowed(step, self._config.weight_sync.max_lag)
        while True:
            batch, facts_ref = self._actors.buffer.take.options(num_returns=2).remote(step, oldest)
            facts: BatchFacts = await facts_ref
            if not facts.rejected_items:
                break
            rejected += len(facts.rejected_items)
            self._num_finished -= len(facts.rejected_items)
            self._ledger.give_back([item.group_id for item in facts.rejected_items])
            retried = self._ledger.take(len(facts.rejected_items))
            await asyncio.gather(*(self._rollout(item) for item in retried))
        self._ledger.mark_trained(facts.group_ids)
        waited = time.perf_counter() - started
        return batch, {**facts.metrics, "lag/rejected": rejected, "timing/wait_for_batch_s": waited}

    # Publishing

    async def _publish(self, version: int, snapshot: Any, metrics: Metrics) -> None:
        """Bring the version to the Generators, write the step's line, and evaluate if it is time.

        The next version is published after this returns, so an evaluation sees one version only.
        """
        started = time.perf_counter()
        if not self._config.weight_sync.in_flight:
            await self._until_all_admitted_finished(version - 1)
        metrics |= {"timing/weight_sync/join_s": time.perf_counter() - started}
        report: SyncReport = await self._actors.weight_sync.publish.remote(version, [snapshot])
        metrics = {**metrics, **report.metrics, **await self._rates(metrics)}
        self._display.step(version, metrics)
        last = self._config.algorithm.num_steps
        if version % self._config.evaluation.every_num_steps == 0 or version == last:
            metrics |= await self._evaluate(version)
        self._metrics.append(version, metrics)

    async def _until_all_admitted_finished(self, published_version: int) -> None:
        """Wait until every group that `published_version` let in is in the buffer."""
        algorithm = self._config.algorithm
        limit = admission_limit(published_version, self._config.weight_sync.max_lag, algorithm.prompts_per_step)
        num_admitted = min(limit, algorithm.num_steps * algorithm.prompts_per_step)
        async with self._group_finished:
            await self._group_finished.wait_for(lambda: self._num_finished >= num_admitted)

    async def _rates(self, metrics: Metrics) -> Metrics:
        """Seconds, tokens per second and utilization since the last step's line."""
        now = time.perf_counter()
        seconds, self._last_line_at = now - self._last_line_at, now
        trained_s, self._trained_s = self._trained_s, 0.0
        stats = await self._take_stats()
        busy = [s.busy_s for s in stats]
        return {
            "timing/step_s": seconds,
            "timing/generate_s": max(busy),
            "utilization/learner": trained_s / seconds,
            "utilization/generators": sum(busy) / len(busy) / seconds,
            "throughput/sampled_tokens_per_s": sum(s.sampled_tokens for s in stats) / seconds,
            "throughput/trained_tokens_per_s": metrics["throughput/trained_tokens"] / seconds,
        }

    async def _take_stats(self) -> list[GeneratorStats]:
        return await asyncio.gather(*(g.take_stats.remote() for g in self._actors.generators.values()))

    async def _evaluate(self, step: int) -> Metrics:
        started = time.perf_counter()
        groups = await asyncio.gather(*(self._evaluate_item(item) for item in self._prepared.validation))
        summary = summarise(step, groups)
        write_evaluation(self._run.evaluations, summary, groups)
        self._display.evaluation(summary)
        self.evaluations[step] = groups
        return {**summary.metrics, "timing/evaluate_s": time.perf_counter() - started}

    async def _evaluate_item(self, item: PromptItem) -> ScoredGroup:
        with self._sampling(item, self._config.evaluation.samples_per_prompt) as group:
            return await self._actors.scorer.score.remote(group)


def _first(errors: BaseExceptionGroup) -> BaseException:
    """The first error of the group: the others are its consequences."""
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
