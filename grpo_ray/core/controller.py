"""The controller: one run from its first step, or its last checkpoint, to the end.

    producer, all groups at once:          for group in book.admit():                    (the version opens it)
                                               generator.generate -> scorer.score -> buffer.put
    controller, one step after another:    for step in 1 .. num_steps:
                                               batch = buffer.take(book.batch(step))     (waits for its groups)
                                               learner.train_step(batch)                 (version n - 1 -> n)
                                               weights = learner.snapshot()
                                               wait for the publish before
                                               capture a checkpoint, when due
                                               begin publish(n, weights)
    publish, during the next step:         weight_sync.publish(n, weights)               (stage, switch)
                                           book.publish(n)                               (admission opens)
                                           validate, when due; write the step's metrics

It holds references and small facts, never tokens. Only evaluations are fetched whole, to be shown and written.
A Generator, Scorer, Teacher or EnvironmentWorker that dies is replaced. A Learner, buffer or WeightSync that
dies ends `run` with ActorDied, and the caller starts again from the last checkpoint (run/restores.py).
docs/architecture.md has the table of a group's states.
"""

import asyncio
import contextlib
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from time import monotonic
from typing import TypeVar

from grpo_ray.config import Config
from grpo_ray.core.checkpointing import GIVE_UP_S, RETRY_S, Checkpointing
from grpo_ray.core.clients import ActorClient, RunActors
from grpo_ray.core.context import Prepared, RunContext
from grpo_ray.core.groups import GroupBook, State
from grpo_ray.core.pool import GeneratorPool, training_settings
from grpo_ray.core.producer import RolloutProducer
from grpo_ray.core.stalls import StallWatch
from grpo_ray.core.starting import until_all_ready
from grpo_ray.core.step_metrics import StepMetrics
from grpo_ray.core.validation import Validation
from grpo_ray.engines.base import EngineDied
from grpo_ray.errors import ActorDied, DataLost, RunError, Stalled, first_error
from grpo_ray.records.checkpoint import Checkpoint, CheckpointStore
from grpo_ray.records.run_files import step_name
from grpo_ray.transfer.messages import Snapshot, WeightSnapshot
from grpo_ray.types import Ref, StepReport, SyncReport, TrainBatch
from grpo_ray.watch.event_loop import TasksAlongside
from grpo_ray.watch.metrics_catalog import RANK, SENT
from grpo_ray.watch.open_calls import OpenCalls
from grpo_ray.watch.restarts import RestartBudget
from grpo_ray.watch.run_log import Metrics, RunLog
from grpo_ray.watch.run_state import LiveStatus
from grpo_ray.watch.stage_clock import StageClock

T = TypeVar("T")
RECOVERABLE = (ActorDied, DataLost, EngineDied, Stalled)  # the run can continue from its last checkpoint
LAST_WRITE_S = 3600.0  # while nothing else moves: a large model's state on a slow file system
LAST_LINE_S = 5.0  # for a version that is being published, and perhaps validated, when the run is stopped
STAGES = ("evaluate", "checkpoint", "train", "join", "publish", "wait_for_batch")


@dataclass(frozen=True)
class Packed:
    """A version's weights as the Learner packs them; `copied` and `sent_frac` are its answers."""

    whole: Ref[WeightSnapshot]
    copied: Awaitable[int]
    changes: Ref[WeightSnapshot | None] | None
    sent_frac: Awaitable[float] | None


class Controller:
    """The driver of one run's actors; its `version` is the Learner's, so step n turns `n - 1` into `n`."""

    def __init__(
        self, config: Config, prepared: Prepared, actors: RunActors, log: RunLog, store: CheckpointStore,
        budget: RestartBudget, checkpoint: Checkpoint | None = None,
    ) -> None:  # fmt: skip
        self._config, self._actors, self._log = config, actors, log
        self._checkpoint = checkpoint
        self.version = self._first_version = log.step = checkpoint.state.step if checkpoint else 0
        self.has_begun = False  # every actor has been up, and the first step can start
        self._calls = OpenCalls()
        self._clock = StageClock(STAGES, rest="idle", on_turn=actors.show_phase)
        self._context = context = RunContext(config, actors, self._calls, log, self._clock)
        settings = training_settings(config.sampling, prepared.model.end_token_ids)
        self._pool = GeneratorPool(context, actors.weight_sync, settings, budget)
        self.book = GroupBook(config, prepared.prompts, self.version)
        self._producer = RolloutProducer(context, self.book, self._pool)
        self._step_metrics = StepMetrics(context, self._pool)
        self._validation = Validation(context, prepared.validation, self._pool)
        self._checkpointing = Checkpointing(context, store, self.book.state_dict, self.version)
        self._tasks: asyncio.TaskGroup | None = None
        self._stop = asyncio.Event()
        self._is_preempted = False
        self._unlogged: dict[int, Metrics] = {}  # metrics of trained steps that are not written yet
        self._in_training: Metrics | None = None  # of the Learner's batch

    # Current state

    def live_status(self) -> LiveStatus:
        """Return the current state; another thread may call this, so it only reads."""
        book = self.book
        return LiveStatus(
            step=self.version,
            published_version=book.published_version,
            num_sampling=book.num_in(State.IN_FLIGHT, State.SCORED, State.ENTERING),
            num_buffered=book.num_in(State.BUFFERED, State.DROPPED),
            actors=self._calls.states(self._actors.by_name()),
            is_evaluating=self._clock.current == "evaluate",
            is_stopping=self.was_stopped,
        )

    # From start to end

    @property
    def was_stopped(self) -> bool:
        return self._stop.is_set()

    def stop(self, is_preempted: bool = False) -> None:
        """End after the current step, with a checkpoint; a preemption leaves no time for an evaluation."""
        self._is_preempted |= is_preempted  # also if the Python program stops it as well
        self._stop.set()

    async def run(self) -> None:
        """Train until `num_steps`, or until `stop`; in both cases the last step gets a checkpoint.

        Raises:
            ActorDied, DataLost, Stalled: the run can continue from its last checkpoint.
            RunError, or an actor's own error: the run cannot continue; the last good weights have a checkpoint.
        """
        try:
            async with TasksAlongside() as until_saved:
                limit_s, work_done = self._config.recovery.stall_timeout_s, self._actors.learner.work_done
                watch = StallWatch(self._calls, self._pool, self._log, limit_s, work_done)
                async with TasksAlongside() as tasks:
                    self._tasks = tasks
                    self._pool.start(tasks)
                    with contextlib.suppress(_Stopped):
                        await self._unless_stopped(until_all_ready(self._context, self._ready))
                        self._calls.progress()
                        until_saved.create_task(watch.run())
                        await self._unless_stopped(self._begin())
                        tasks.create_task(self._producer.run(tasks))
                        await self._train()
                watch.limit_s = max(watch.limit_s, LAST_WRITE_S)
                await self._save()
        except BaseExceptionGroup as errors:
            error = first_error(errors)
            if not isinstance(error, RECOVERABLE):
                await self._save_after_error()
            raise error from error.__cause__  # which has the actor's traceback

    async def _ready(self, actor: ActorClient) -> None:
        with self._calls.call(actor.name, "starts"):
            try:
                await actor.ready()
            except ActorDied:
                if RANK.fullmatch(actor.name):
                    await self._actors.learner.ready()  # of several ranks, names the one that is the cause
                raise

    async def _begin(self) -> None:
        """Restore the groups of the checkpoint, and finish its last step.

        With an adapter the Generators have only its base so far: they get the Learner's weights first.
        """
        if self._config.model.adapter is not None:
            self._log.display.status("sending the adapted weights")
            report = await self._sync(self.version, await self._pack_first(), is_initial=True)
            if self._checkpoint is None and len(report.failed) == self._config.generator.num_generators:
                raise RunError(f"no Generator can load the adapted weights: {min(report.failed.values())}")
        state = self._checkpoint.state if self._checkpoint is not None else None
        await self._producer.begin(state.ledger if state is not None else None)
        if state is not None and self._log.last_logged_step < self.version:
            self._unlogged[self.version] = dict(state.metrics)
        if self._validation.is_due(self.version):
            self._log.display.status("evaluating the policy")
        await self._finish_step(self.version)
        self._log.display.status("training")
        await self._step_metrics.begin()
        self.has_begun = True

    async def _pack_first(self) -> Packed:
        """Return the Learner's weights; sharded ones are gathered on the device, which Generators may share."""
        is_shared = self._config.generator.colocated and self._config.learner.num_ranks > 1
        if is_shared:
            await self._give_device_to_learner()
        packed = self._pack()
        if is_shared:
            await self._give_device_to_generators()
        return packed

    def _pack(self) -> Packed:
        """Have the Learner copy its weights, and with `weight_sync.delta` find what has changed in them."""
        learner = self._actors.learner
        whole, copied = learner.snapshot()
        changes, sent_frac = learner.delta() if self._config.weight_sync.delta else (None, None)
        return Packed(whole, copied, changes, sent_frac)

    # Training

    async def _train(self) -> None:
        published: asyncio.Task[None] | None = None
        try:
            for step in range(self.version + 1, self._config.algorithm.num_steps + 1):
                batch, metrics = await self._unless_stopped(self._next_batch(step))
                if self._config.generator.colocated:
                    if published is not None:
                        await self._unless_stopped(published)
                    await self._give_device_to_learner()
                report = await self._learn(step, batch, metrics)
                # The Learner's calls run in order: the next step starts once the snapshot has been copied.
                packed = self._pack()
                if published is not None:
                    await published  # and evaluated: the next publish replaces those weights
                if self._checkpointing.is_due(step):
                    with self._calls.call("learner", f"copies the weights of version {step}"):
                        await packed.copied  # its error, before the next call waits for the rank that failed
                    metrics |= await self._checkpointing.begin(metrics, self._log.unwritten())
                if self._config.generator.colocated:
                    await self._give_device_to_generators()
                assert self._tasks is not None
                published = self._tasks.create_task(self._publish(step, packed))
                self._check_skipped(report)
            if published is not None:
                await self._unless_stopped(published)
        except _Stopped:
            if published is not None:
                if not self._is_preempted:
                    await asyncio.wait({published}, timeout=LAST_LINE_S)
                published.cancel()  # the checkpoint holds the metrics of its step known so far

    async def _give_device_to_learner(self) -> None:
        """Put the Generators to sleep, and move the Learner onto the device.

        No group is being sampled: the batch is complete, and none of the next one is admitted yet.
        """
        await self._pool.sleep()
        with self._calls.call("learner", "moves onto the device"):
            await self._actors.learner.take_room()

    async def _give_device_to_generators(self) -> None:
        """Let the Learner make room on the device, and wake the Generators.

        The Learner's calls run in order, so its snapshot has been copied by then.
        """
        with self._calls.call("learner", "moves off the device"):
            await self._actors.learner.make_room()
        await self._pool.wake()

    async def _next_batch(self, step: int) -> tuple[Ref[TrainBatch], Metrics]:
        """Wait for the batch of `step`, and have the buffer hand it out."""
        with self._clock.stage("wait_for_batch", f"step {step}") as duration:
            batch = await self._producer.next_batch(step)
            with self._calls.call("buffer", f"hands out the batch of step {step}", is_waiting=True):
                groups, answer = self._actors.buffer.take(
                    step, batch.group_ids, batch.dropped_ids, batch.oldest_version
                )
                facts = await answer
        self._log.warning("rollouts", facts.write_error)
        for note in facts.notes:
            self._log.event("rollouts_changed", "buffer", note)
        if facts.ungraded is not None:
            if facts.ungraded.is_all:
                raise RunError(facts.ungraded.refusal(f"of step {step}"))
            self._log.ungraded[step] = facts.ungraded
        metrics = self._log.bounded(facts.metrics)
        metrics |= {"lag/rejected": batch.num_refused, "timing/wait_for_batch_s": duration.seconds}
        metrics |= {"buffer/groups": batch.num_buffered, "buffer/bytes": batch.num_bytes}
        if self._config.num_oversampled:
            metrics["rollout/cut_groups"] = batch.num_cut
        return groups, metrics

    async def _learn(self, step: int, batch: Ref[TrainBatch], metrics: Metrics) -> StepReport:
        self._in_training = metrics
        with self._clock.stage("train", f"step {step}"), self._calls.call("learner", f"trains step {step}"):
            report = await self._actors.learner.train_step(batch)
        self._settle_step(report)
        for kind, text in report.events.items():
            self._log.event(kind, "learner", text)
        return report

    def _settle_step(self, report: StepReport) -> None:
        """Account for a finished step: its prompts are trained, and its metrics can be written."""
        assert self._in_training is not None
        metrics = self._in_training
        metrics |= report.metrics | self._producer.step_trained(report.version)
        metrics |= self._step_metrics.of_recovery()
        self._unlogged[report.version] = metrics
        self.version = self._log.step = report.version
        self._in_training = None

    def _check_skipped(self, report: StepReport) -> None:
        """Report an update that was skipped because it was not finite; end the run after several in a row."""
        in_a_row, folder = int(report.metrics["optim/skipped_in_a_row"]), self._log.run.skipped
        if report.metrics["optim/skipped_updates"]:
            batch = folder / f"{step_name(report.version)}.parquet"
            text = f"an update of step {report.version} is not finite and is skipped; {batch} holds its batch"
            self._log.event("update_skipped", "learner", text)
        if in_a_row >= self._config.recovery.max_skipped_updates:
            raise RunError(
                f"recovery.max_skipped_updates: {in_a_row} steps in a row had no finite update ({folder}); "
                "try a lower learner.learning_rate, from an earlier checkpoint if the newest has broken weights"
            )

    # Publishing

    async def _publish(self, version: int, packed: Packed) -> None:
        """Load the version into the Generators, write the step's metrics, and evaluate when due.

        The next version is published after this returns, so an evaluation sees one version only.
        """
        metrics = self._unlogged[version]
        async with contextlib.AsyncExitStack() as until_published:
            with self._clock.stage("join", f"version {version}") as joining:
                if not self._config.weight_sync.in_flight:
                    await until_published.enter_async_context(self._producer.drained())
            metrics |= {"timing/weight_sync/join_s": joining.seconds}
            report = await self._sync(version, packed)
        window = await self._step_metrics.take(metrics["throughput/trained_tokens"])
        metrics |= {**report.metrics, **window, **self._checkpointing.take_metrics()}
        self._log.display.step(version, metrics)
        await self._finish_step(version)

    async def _sync(self, version: int, packed: Packed, is_initial: bool = False) -> SyncReport:
        """Load the weights into the Generators; those that fail are replaced."""
        snapshot, sent = Snapshot(packed.whole), Metrics()
        with self._clock.stage("publish", f"version {version}"):
            with self._calls.call("learner", f"copies the weights of version {version}"):
                await packed.copied  # first, or a Learner that is stuck would look like Generators that are
                if packed.sent_frac is not None:
                    sent[SENT] = sent_frac = await packed.sent_frac
                    snapshot = Snapshot(packed.whole, packed.changes if sent_frac < 1 else None)
            with self._calls.call("weight_sync", f"publishes version {version}"):
                report = await self._actors.weight_sync.publish(version, snapshot, is_initial)
        self._producer.published(version)
        for number, error in report.failed.items():
            self._pool.fail(number, error)
        return replace(report, metrics={**report.metrics, **sent})

    async def _finish_step(self, step: int) -> None:
        """Evaluate when due, and write the step's metrics unless that has been done."""
        metrics = self._unlogged.get(step, {})
        if self._validation.is_due(step):
            metrics |= await self._evaluate(step)
        if step in self._unlogged:
            self._log.line(step, metrics)
            self._actors.show_metrics(step, metrics)
            del self._unlogged[step]
        self._validation.write()
        self._log.warning("checkpoint", self._checkpointing.problem)
        self._log.show_warnings()

    async def _evaluate(self, step: int) -> Metrics:
        """Validate the policy after `step`, unless a preemption comes while the Learner trains the next one.

        That step's checkpoint would have to wait for it. A resumed run repeats one of the newest step.
        """
        evaluating = asyncio.ensure_future(self._validation.evaluate(step))
        try:
            while not (await asyncio.wait({evaluating}, timeout=0.1))[0]:
                if self._is_preempted and step < self.version:
                    text = f"the preemption left no time to validate step {step}"
                    self._log.event("not_evaluated", None, text, validation_step=step)
                    return {}
            return evaluating.result()
        finally:
            evaluating.cancel()

    # Ending

    async def _unless_stopped(self, awaitable: Awaitable[T]) -> T:
        """Return the awaited result; raise _Stopped if the run is stopped first. A given task keeps running."""
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

    async def _save(self, patience_s: float = GIVE_UP_S) -> None:
        """Write a checkpoint of the newest step, and wait until it is complete.

        A disk that refuses it, or the records before it, is tried again for `patience_s`: it may get room.
        """
        if self.version == self._first_version:
            return
        give_up_at = monotonic() + patience_s
        while True:
            self._validation.write()
            self._log.warning("rollouts", await self._actors.buffer.flush())
            await self._checkpointing.begin(self._unlogged.get(self.version, {}), await self._log.on_disk())
            await self._checkpointing.settle()
            if (problem := self._checkpointing.problem) is None:
                return
            if monotonic() + RETRY_S > give_up_at:
                raise RunError(f"{problem}; the steps after the last checkpoint are lost")
            self._log.display.warning(f"{problem}; trying again (a second Ctrl-C gives up)")
            await asyncio.sleep(RETRY_S)

    async def _save_after_error(self) -> None:
        """Write a checkpoint of the last good weights before the run ends with an error."""
        if not self.has_begun:
            return
        try:
            async with asyncio.timeout(self._config.recovery.stall_timeout_s):
                await self._checkpointing.settle()  # or a checkpoint would be written of what is replaced now
                report = await self._actors.learner.capture()
                if report is not None and report.version > self.version and self._in_training is not None:
                    self._settle_step(report)  # the error came while the Learner finished a step
                for step in sorted(self._unlogged.keys() - {self.version}):  # the error ended its publication
                    self._log.line(step, self._unlogged.pop(step))
                    if self._validation.is_due(step):
                        text = f"the error left no time to validate step {step}"
                        self._log.event("not_evaluated", None, text, validation_step=step)
                await self._save(patience_s=0)
        except Exception as error:  # the error that ended the run is the one to raise
            self._log.event("not_saved", None, f"no last checkpoint could be written: {error!r}")


class _Stopped(Exception):
    """A request to stop the run."""
