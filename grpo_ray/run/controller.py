"""The controller: one run from its first step, or its last checkpoint, to the end. It reads top to bottom.

    Production: admission -> Rollouts (Generator -> Scorer) -> TrajectoryBuffer    (all groups at once)
    _train:     TrajectoryBuffer -> Learner -> snapshot, a checkpoint when due      (one batch after another)
    _publish:   snapshot -> WeightSync -> Generators, then admission opens          (overlaps the next _train)

It holds references and small facts, never tokens; evaluations, which are shown and filed, come here whole.
What dies in Rollouts is replaced there. A Learner, buffer or WeightSync that dies ends `run` with ActorDied,
and the caller begins again from the last checkpoint.
"""

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Any, TypeVar

from grpo_ray.actors.staleness import oldest_allowed
from grpo_ray.config import Config
from grpo_ray.errors import ActorDied, DataLost, RunError, Stalled, first_error
from grpo_ray.run.checkpointing import Checkpointing
from grpo_ray.run.generator_pool import Rollouts, training_settings
from grpo_ray.run.open_calls import OpenCall, Watch
from grpo_ray.run.preflight import Prepared
from grpo_ray.run.restarts import RestartBudget
from grpo_ray.run.rollout_producer import Production
from grpo_ray.run.stalls import keep_watch
from grpo_ray.run.step_metrics import StepFigures
from grpo_ray.run.validation import Validation
from grpo_ray.telemetry.checkpoint import Checkpoint, CheckpointStore
from grpo_ray.telemetry.run_files import last_logged_step, step_name
from grpo_ray.telemetry.run_log import Metrics, RunLog
from grpo_ray.telemetry.run_state import ActorState, LiveStatus
from grpo_ray.telemetry.stage_clock import StageClock
from grpo_ray.types import BatchFacts, StepReport, SyncReport

T = TypeVar("T")
RECOVERABLE = (ActorDied, DataLost, Stalled)  # the run can go on from its last checkpoint
STAGES = ("evaluate", "checkpoint", "train", "join", "publish", "wait_for_batch")


class Controller:
    def __init__(
        self,
        config: Config,
        prepared: Prepared,
        actors: Any,
        log: RunLog,
        store: CheckpointStore,
        budget: RestartBudget,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self._config, self._actors, self._log, self._budget = config, actors, log, budget
        self._ledger = prepared.ledger
        self._checkpoint = checkpoint
        self._version = self._first_step = checkpoint.state.step if checkpoint else 0
        self.has_begun = False  # every actor has been up
        self._watch = Watch()
        settings = training_settings(config.sampling, prepared.end_token_ids)
        self._rollouts = Rollouts(config, settings, actors, self._watch, budget, log)
        self._clock = StageClock(STAGES, rest="idle", on_turn=actors.show_phase)
        self._figures = StepFigures(config.generator.num_generators, self._rollouts, actors, log, self._clock)
        self._validation = Validation(config, prepared, self._rollouts, actors, log, self._clock)
        self._checkpointing = Checkpointing(
            config.checkpoint, store, actors, self._ledger, self._watch, self._clock, self._version
        )
        log.step = self._version
        self._production = Production(
            config, self._ledger, self._rollouts, actors, self._watch, log, self._version
        )
        self._tasks: asyncio.TaskGroup | None = None
        self._stop = asyncio.Event()
        self._unlogged: dict[int, Metrics] = {}  # trained steps whose line is not written yet
        self._in_training: tuple[BatchFacts, Metrics] | None = None  # the Learner's batch

    def live_status(self) -> LiveStatus:
        """What is going on at this moment; another thread may ask, so this only reads."""
        calls, in_training = self._watch.by_actor(), self._in_training
        return LiveStatus(
            step=self._version,
            published_version=self._production.published_version,
            num_sampling=len(self._ledger.in_flight),
            num_buffered=len(self._ledger.buffered - set(in_training[0].group_ids if in_training else ())),
            actors=tuple(self._actor_state(name, calls.get(name, [])) for name in self._actors.by_name()),
            is_evaluating=self._clock.current == "evaluate",
            is_stopping=self.was_stopped,
        )

    def _actor_state(self, name: str, calls: list[OpenCall]) -> ActorState:
        if not calls:
            return ActorState(name=name)
        first = calls[0]
        return ActorState(
            name=name,
            doing=first.what,
            for_s=self._watch.age_s(first),
            num_calls=len(calls),
            is_waiting=first.is_waiting,
        )

    @property
    def was_stopped(self) -> bool:
        return self._stop.is_set()

    def stop(self) -> None:
        """End after the present step, with a checkpoint."""
        self._stop.set()

    async def run(self) -> None:
        """Train until `num_steps`, or until `stop`; either way the last step has a checkpoint then.

        Raises:
            ActorDied, DataLost, Stalled: the run can go on from its last checkpoint.
            RunError, or an actor's own error: it cannot; the last good weights have a checkpoint.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                self._rollouts.start(tasks)
                watching: asyncio.Task[None] | None = None
                with contextlib.suppress(_Stopped):
                    await self._unless_stopped(self._until_ready())
                    watching = tasks.create_task(self._keep_watch())
                    await self._unless_stopped(self._take_up())
                    self._production.start(tasks)
                    await self._train()
                self._production.cancel()
                for task in self._rollouts.replacing:
                    task.cancel()
                await self._save()
                if watching is not None:
                    watching.cancel()
        except BaseExceptionGroup as errors:
            error = first_error(errors)
            if not isinstance(error, RECOVERABLE):
                await self._save_what_there_is()
            raise error from None

    async def _take_up(self) -> None:
        """Begin where the checkpoint ends: its ledger, its groups, and what its last step still lacks."""
        if self._checkpoint is not None:
            state = self._checkpoint.state
            self._ledger.load_state_dict(state.ledger, await self._actors.buffer.group_ids())
            if last_logged_step(self._log.run.metrics_path) < self._version:
                self._unlogged[self._version] = dict(state.metrics)
        await self._production.begin(self._version, is_resumed=self._checkpoint is not None)
        if self._validation.is_due(self._version):
            self._log.display.status("evaluating the policy")
        await self._finish_step(self._version)
        self._log.display.status("training")
        await self._figures.begin()
        self.has_begun = True

    async def _until_ready(self, notice_s: float = 60.0) -> None:
        """Wait for every actor; say which are not up when it takes long, as on a busy cluster."""
        self._log.display.status("starting the actors")
        waits = {asyncio.ensure_future(self._ready(a)): name for name, a in self._actors.by_name().items()}
        pending = set(waits)
        notice_s = min(notice_s, self._config.recovery.stall_timeout_s / 2)  # starting is no stall
        while pending:
            done, pending = await asyncio.wait(pending, timeout=notice_s, return_when=asyncio.FIRST_EXCEPTION)
            for ready in done:
                ready.result()
            if pending:
                names = ", ".join(sorted(waits[ready] for ready in pending))
                self._log.display.status(
                    f"still waiting for {names} (is the cluster busy? see {self._log.run.logs})"
                )
        self._watch.progress()

    async def _ready(self, actor: Any) -> None:
        with self._watch.call(actor.name, "starts"):
            await actor.ready()

    async def _keep_watch(self) -> None:
        limit_s = self._config.recovery.stall_timeout_s
        await keep_watch(self._watch, self._rollouts, self._actors, self._log, limit_s)

    # Training

    async def _train(self) -> None:
        published: asyncio.Task[None] | None = None
        try:
            for step in range(self._version, self._config.algorithm.num_steps):
                batch, facts, metrics = await self._unless_stopped(self._next_batch(step))
                if self._config.generator.colocated:
                    if published is not None:
                        await published
                    await self._give_learner_its_turn()
                report = await self._learn(batch, facts, metrics)
                # The Learner's calls run in order: the next step starts once the snapshot has been copied.
                snapshot, copied = self._actors.learner.snapshot.split()
                if published is not None:
                    await published  # its evaluation, too, must be done: those weights are gone after this
                if self._checkpointing.is_due(report.version):
                    metrics |= await self._checkpointing.begin(metrics, self._log.unwritten())
                if self._config.generator.colocated:
                    await self._give_generators_their_turn()
                assert self._tasks is not None
                published = self._tasks.create_task(self._publish(report.version, snapshot, copied))
                self._check_skipped(report)
            if published is not None:
                await self._unless_stopped(published)
        except _Stopped:
            if published is not None:
                published.cancel()  # the checkpoint holds what is known of its step

    async def _give_learner_its_turn(self) -> None:
        """Colocated: nothing is being sampled, as this batch is whole and none of the next is admitted."""
        await self._rollouts.ask_all("sleep")
        with self._watch.call("learner", "takes its room on the device"):
            await self._actors.learner.take_room()

    async def _give_generators_their_turn(self) -> None:
        """The Learner's calls run in order: it leaves after the snapshot has been copied."""
        with self._watch.call("learner", "leaves its room on the device"):
            await self._actors.learner.make_room()
        await self._rollouts.ask_all("wake")

    async def _next_batch(self, step: int) -> tuple[Any, BatchFacts, Metrics]:
        """A reference to the batch of `step`, and its facts; too old groups are sampled again."""
        with self._clock.stage("wait_for_batch", f"step {step + 1}") as duration:
            batch, facts, rejected = await self._take_batch(step)
        metrics = {**facts.metrics, "lag/rejected": rejected, "timing/wait_for_batch_s": duration.seconds}
        metrics |= await self._production.settle_batch(step, facts)
        return batch, facts, metrics

    async def _take_batch(self, step: int) -> tuple[Any, BatchFacts, int]:
        """The batch's reference and facts, and how many groups were refused before it was whole."""
        rejected = 0
        oldest = oldest_allowed(step, self._config.weight_sync.max_lag)
        while True:
            with self._watch.call("buffer", f"waits for the groups of step {step + 1}", is_waiting=True):
                batch, coming = self._actors.buffer.take.split(step, oldest)
                facts: BatchFacts = await coming
            self._log.warning("rollouts", facts.write_error)
            # The buffer has answered for these; the answers to their puts may still be on their way here.
            await self._production.until_answered(
                {*facts.group_ids, *facts.rejected_ids, *facts.dropped_ids, *facts.cut_ids}
            )
            if not facts.rejected_ids:
                return batch, facts, rejected
            rejected += len(facts.rejected_ids)
            self._production.sample_again(facts.rejected_ids)

    async def _learn(self, batch: Any, facts: BatchFacts, metrics: Metrics) -> StepReport:
        self._in_training = facts, metrics
        step = self._version + 1
        with self._clock.stage("train", f"step {step}"), self._watch.call("learner", f"trains version {step}"):
            report: StepReport = await self._actors.learner.train_step(batch)
        self._settle_step(report)
        if report.profile_error is not None:
            self._log.event("profile_failed", "learner", report.profile_error)
        return report

    def _settle_step(self, report: StepReport) -> None:
        """The step is done: its prompts are trained, and its line can be written."""
        assert self._in_training is not None
        facts, metrics = self._in_training
        self._ledger.observe(facts.outcomes)
        self._ledger.mark_trained(facts.group_ids)
        self._ledger.mark_dropped(facts.dropped_ids)
        metrics |= {**report.metrics, **self._ledger.metrics(), **self._recovery_metrics()}
        self._unlogged[report.version] = metrics
        self._version = self._log.step = report.version
        self._in_training = None

    def _check_skipped(self, report: StepReport) -> None:
        """A non-finite update was skipped: say so, and end the run when it is one of several in a row."""
        in_a_row, folder = int(report.metrics["optim/skipped_in_a_row"]), self._log.run.skipped
        if report.metrics["optim/skipped_updates"]:
            batch = folder / f"{step_name(report.version)}.parquet"
            text = f"an update of step {report.version} is not finite and is skipped; {batch} holds its batch"
            self._log.event("update_skipped", "learner", text)
        if in_a_row >= self._config.recovery.max_skipped_updates:
            raise RunError(
                f"recovery.max_skipped_updates: {in_a_row} steps in a row had no finite update. The last good "
                f"weights are in the newest checkpoint, the batches in {folder}; "
                "try a lower learner.learning_rate"
            )

    # Publishing

    async def _publish(self, version: int, snapshot: Any, copied: Awaitable[int]) -> None:
        """Bring the version to the Generators, write the step's line, and evaluate if it is time.

        The next version is published after this returns, so an evaluation sees one version only.
        """
        metrics = self._unlogged[version]
        with self._clock.stage("join", f"version {version}") as joining:
            if not self._config.weight_sync.in_flight:
                await self._production.until_none_runs(version - 1)
        metrics |= {"timing/weight_sync/join_s": joining.seconds}
        with self._clock.stage("publish", f"version {version}"):
            with self._watch.call("learner", f"copies the weights of version {version}"):
                await copied  # first, or a Learner that is stuck would look like Generators that are
            seats = self._rollouts.seats
            with self._watch.call("weight_sync", f"publishes version {version}"):
                report: SyncReport = await self._actors.weight_sync.publish(version, [snapshot])
        for name, error in report.failed.items():
            self._rollouts.report(name, error, seats.get(name))
        figures = await self._figures.take(metrics["throughput/trained_tokens"])
        metrics |= {**report.metrics, **figures, **self._checkpointing.take_metrics()}
        self._log.display.step(version, metrics)
        await self._finish_step(version)

    async def _finish_step(self, step: int) -> None:
        """Evaluate if it is time, and write the step's line unless it is there."""
        metrics = self._unlogged.get(step, {})
        if self._validation.is_due(step):
            metrics |= await self._validation.evaluate(step)
        if step in self._unlogged:
            self._log.line(step, metrics)
            self._actors.show_metrics(step, metrics)
            del self._unlogged[step]
        self._validation.write()
        self._log.warning("checkpoint", self._checkpointing.problem)
        self._log.show_warnings()

    def _recovery_metrics(self) -> Metrics:
        retried, self._rollouts.num_retried = self._rollouts.num_retried, 0
        return {
            "rollout/retried_groups": retried,
            "rollout/set_aside_groups": len(self._ledger.set_aside),
            "recovery/restarts": self._log.num_events("generator_failed", "scorer_failed"),
            "recovery/restores": self._log.num_events("restored"),
        }

    # Ending

    async def _unless_stopped(self, awaitable: Awaitable[T]) -> T:
        """What is awaited; raises _Stopped when the run is to stop first. A task is left running."""
        if self.was_stopped and asyncio.iscoroutine(awaitable):
            awaitable.close()
            raise _Stopped
        work = asyncio.ensure_future(awaitable)
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            raise _Stopped
        finally:
            stop.cancel()
            if work is not awaitable:
                work.cancel()

    async def _save(self) -> None:
        """A checkpoint of the newest step, written to its end; a disk that was full may have room again."""
        if self._version == self._first_step:
            return
        self._validation.write()
        self._log.warning("rollouts", await self._actors.buffer.flush())
        self._log.flush()
        await self._checkpointing.begin(self._unlogged.get(self._version, {}), self._log.unwritten())
        await self._checkpointing.settle()
        if self._checkpointing.problem is not None:
            raise RunError(f"{self._checkpointing.problem}; older checkpoints are as they were")

    async def _save_what_there_is(self) -> None:
        """A checkpoint of the last good weights, before the run ends with an error of its own."""
        if not self.has_begun:
            return
        try:
            async with asyncio.timeout(self._config.weight_sync.phase_timeout_s):
                report = await self._actors.learner.capture()
                if report is not None and report.version > self._version and self._in_training is not None:
                    self._settle_step(report)  # it was in the middle of a step, and has finished it
                await self._save()
        except Exception as error:  # the run's own error is the one to be raised
            self._log.event("not_saved", None, f"no last checkpoint could be written: {error}")


class _Stopped(Exception):
    """The run is to stop."""
