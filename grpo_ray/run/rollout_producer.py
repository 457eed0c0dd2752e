"""The producer of groups: admission -> prompts -> GeneratorPool -> the buffer.

It owns the PromptLedger, and with it the one account of where each group is. Admission (WeightSync,
actors/staleness.py) decides when the next group may be dispatched. The slot of a group that will not be
trained, because it was set aside or dropped, goes to another group; a group that was cut off is sampled again.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_ray.actors.staleness import extra_slots_at, oldest_allowed, version_trained_at
from grpo_ray.errors import RunError
from grpo_ray.run.context import RunContext
from grpo_ray.run.generator_pool import GeneratorPool
from grpo_ray.tasks.prompt_ledger import PromptLedger
from grpo_ray.telemetry.run_log import Metrics
from grpo_ray.types import Admitted, BatchFacts, PromptItem

SLICE = 1000  # groups dispatched at a time


@dataclass
class _Rollout:
    """A group on its way into the buffer."""

    task: "asyncio.Task[None]"
    keeps_old: bool  # its old tokens are masked, so it is never cut off
    version: int | None = None  # the published version when a Generator was given it; None while it waits


class RolloutProducer:
    """The producer of groups, in parallel with training: call `begin`, then `start`.

    The controller reports each batch with `batch_taken`, and each finished step with `batch_trained`.
    """

    def __init__(self, context: RunContext, ledger: PromptLedger, pool: GeneratorPool, version: int) -> None:
        self._config, self._calls, self._log = context.config, context.calls, context.log
        self._actors, self._ledger, self._pool = context.actors, ledger, pool
        self._tasks: asyncio.TaskGroup | None = None
        self._own_tasks: set[asyncio.Task[None]] = set()
        self._rollouts: dict[int, _Rollout] = {}  # by group
        self._progress = asyncio.Condition()
        self._admitted = Admitted(version, 0)
        self._num_slots_on_their_way = 0  # to WeightSync
        self._is_held = False  # nothing is dispatched during a sync that no request may span
        self._oldest_useful = 0  # groups dispatched at older versions are cut off
        self._num_set_aside = self._num_cut = 0  # since the last batch

    @property
    def published_version(self) -> int:
        """The newest version that admission has reported."""
        return self._admitted.version

    @property
    def num_sampling(self) -> int:
        """Groups that are being sampled, scored, or put into the buffer."""
        return self._ledger.num_in_flight

    def num_buffered_without(self, group_ids: Collection[int]) -> int:
        """Return the number of groups in the buffer that are not in `group_ids`."""
        return len(self._ledger.buffered.difference(group_ids))

    def state_dict(self) -> dict[str, Any]:
        """Return the ledger's state, for a checkpoint."""
        return self._ledger.state_dict()

    async def begin(self, version: int, ledger_state: Mapping[str, Any] | None) -> None:
        """Start from the ledger as it was at `version`.

        Args:
            ledger_state: the checkpoint's, for a resumed run; the buffer then holds the groups that were
                buffered at the time.
        """
        ledger, config = self._ledger, self._config
        buffer = self._actors.buffer
        if ledger_state is not None:
            ledger.load_state_dict(dict(ledger_state), await buffer.group_ids())
        await self._add_slots(
            extra_slots_at(
                version, ledger.num_trained, ledger.num_left, config.num_oversampled, config.fresh_per_step
            )
        )
        if ledger_state is not None:
            await self._add_slots(await buffer.begin(sorted(ledger.unfinished), ledger.next_group_id))
        self._note(await self._actors.weight_sync.admission(Admitted(-1, 0)))

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Produce in this task group; an error ends it."""
        self._tasks = tasks
        self._own_tasks.add(tasks.create_task(self._run()))

    def cancel(self) -> None:
        for task in self._own_tasks:
            task.cancel()

    async def _run(self) -> None:
        """Dispatch prompts as admission allows, until cancelled."""
        known = Admitted(-1, 0)
        while True:
            known = await self._actors.weight_sync.admission(known)
            self._note(known)
            await self._until(lambda: not self._is_held)
            self._sample_waiting()
            while (num_new := self._admitted.num_groups - self._ledger.next_group_id) > 0:
                self._dispatch(self._ledger.take_new(min(num_new, SLICE)))
                await asyncio.sleep(0)  # the first ones are sampled, and a signal is answered
            await self._notify()

    def _note(self, admitted: Admitted) -> None:
        """Remember the newest answer of WeightSync; answers can overtake each other."""
        if admitted.exceeds(self._admitted):
            self._admitted = admitted

    def _sample_waiting(self) -> None:
        """Dispatch the waiting groups, unless the published version is so old that they would be cut again."""
        if self._admitted.version >= self._oldest_useful and not self._is_held:
            self._dispatch(self._ledger.take_waiting())

    def _dispatch(self, items: Iterable[PromptItem]) -> None:
        assert self._tasks is not None
        for item in items:
            task = self._tasks.create_task(self._produce(item))
            keeps_old = item.task in self._config.episode_tasks and self._config.episodes.over_age == "mask"
            self._rollouts[item.group_id] = _Rollout(task, keeps_old)
            self._own_tasks.add(task)
            task.add_done_callback(self._own_tasks.discard)

    # One group

    async def _produce(self, item: PromptItem) -> None:
        """Have one group sampled, scored and buffered; only references pass through this process."""
        group_id = item.group_id
        rollout = self._rollouts[group_id]

        def note_version() -> None:
            rollout.version = self._admitted.version

        num_samples = self._config.algorithm.samples_per_prompt
        scored = await self._pool.sample(item, num_samples, "train", note_version)
        if not self._is_current(group_id):  # it was cut off just as its answer arrived
            return
        if scored is None:
            del self._rollouts[group_id]
            await self._set_aside(group_id)
        else:
            self._ledger.mark_scored(group_id)  # from here on it is not cut off
            await self._notify()
            with self._calls.call("buffer", f"takes in group {group_id}", is_waiting=True):
                receipt = await self._actors.buffer.put(*scored)
            if self._is_current(group_id):  # otherwise `batch_taken` was faster than the receipt
                del self._rollouts[group_id]
                if receipt.is_kept:
                    self._ledger.mark_buffered(group_id)
                else:
                    self._cut([group_id])
                    self._sample_waiting()
            await self._add_slots(receipt.num_slots)
        await self._notify()

    def _is_current(self, group_id: int) -> bool:
        """Return whether the calling task is still the one that produces the group."""
        rollout = self._rollouts.get(group_id)
        return rollout is not None and rollout.task is asyncio.current_task()

    async def _set_aside(self, group_id: int) -> None:
        """Give up a group that never finished, despite retries; its slot goes to another prompt."""
        self._ledger.mark_set_aside(group_id)
        self._num_set_aside += 1
        text = f"group {group_id} is set aside; another takes its place"
        self._log.event("set_aside", None, text, group_id=group_id)
        if self._num_set_aside >= self._config.algorithm.prompts_per_step:
            raise RunError(
                f"{self._num_set_aside} groups were set aside while one batch was waited for, as many as it "
                f"has; see {self._log.run.events_path}"
            )
        await self._add_slots(1 + await self._actors.buffer.set_aside(group_id))

    async def _add_slots(self, num_slots: int) -> None:
        """Admit `num_slots` more groups, in place of as many that will not be trained."""
        if num_slots:
            self._num_slots_on_their_way += num_slots
            self._note(await self._actors.weight_sync.add_slots(num_slots))
            self._num_slots_on_their_way -= num_slots

    # The controller's reports

    async def batch_taken(self, step: int, facts: BatchFacts) -> Metrics:
        """Account for the groups of the batch of `step`, and cut off those that are too late for the next."""
        self._account_as_buffered([*facts.group_ids, *facts.dropped_ids, *facts.cut_ids])
        await self._add_slots(facts.num_slots)
        metrics: Metrics = {}
        if self._config.num_oversampled:
            self._cut(facts.cut_ids)
            self._cut_off_running(step + 1)
            self._sample_waiting()
            metrics["rollout/cut_groups"] = self._num_cut
        self._num_set_aside = self._num_cut = 0
        await self._notify()
        return metrics

    def batch_trained(self, facts: BatchFacts) -> Metrics:
        """Account for the groups of a finished step, and return metrics of the prompts."""
        self._ledger.observe(facts.outcomes)
        self._ledger.mark_trained(facts.group_ids)
        self._ledger.mark_dropped(facts.dropped_ids)
        return {**self._ledger.metrics(), "rollout/set_aside_groups": len(self._ledger.set_aside)}

    def sample_again(self, group_ids: Collection[int]) -> None:
        """Sample again the groups that the buffer refused as too old."""
        self._account_as_buffered(group_ids)
        self._ledger.give_back(group_ids)
        if not self._is_held:  # otherwise the next version dispatches them
            self._dispatch(self._ledger.take_waiting())

    def _account_as_buffered(self, group_ids: Iterable[int]) -> None:
        """Mark groups as buffered that the buffer has reported before their receipts arrived here."""
        for group_id in group_ids:
            if self._rollouts.pop(group_id, None) is not None:
                self._ledger.mark_buffered(group_id)

    def _cut(self, group_ids: Collection[int]) -> None:
        """Give groups that came too late to be trained back to the ledger, to be sampled again."""
        self._ledger.cut(group_ids)
        self._num_cut += len(group_ids)

    def _cut_off_running(self, step: int) -> None:
        """Cancel every group in flight that would be too old for the batch of `step`."""
        oldest = oldest_allowed(version_trained_at(step), self._config.weight_sync.max_lag)
        self._oldest_useful = oldest
        scored = self._ledger.scored
        late = [
            group_id
            for group_id, rollout in self._rollouts.items()
            if rollout.version is not None
            and rollout.version < oldest
            and group_id not in scored
            and not rollout.keeps_old
        ]
        for group_id in late:
            self._rollouts.pop(group_id).task.cancel()
        self._cut(late)

    # Waiting

    @contextlib.asynccontextmanager
    async def drained(self, published_version: int) -> AsyncIterator[None]:
        """Wait until every group that `published_version` admits is sampled, and dispatch none in the block."""
        await self._until(lambda: self._is_drained(published_version))
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
            await self._notify()

    def _is_drained(self, published_version: int) -> bool:
        """Return whether every group that the version admits is scored, set aside, or cut off."""
        is_admitted = self._admitted.version >= published_version and not self._num_slots_on_their_way
        is_dispatched = self._ledger.next_group_id >= self._admitted.num_groups
        return is_admitted and is_dispatched and self._ledger.is_all_scored

    async def _notify(self) -> None:
        async with self._progress:
            self._progress.notify_all()

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition, which is checked again whenever a group makes progress."""
        async with self._progress:
            await self._progress.wait_for(condition)
