"""Producing groups: admission -> prompts -> Rollouts -> the buffer, as many at once as admission allows.

The ledger says which prompts are asked, admission when (actors/staleness.py). A group that will not be trained,
because it was set aside or dropped, gives its place to one more; one that was cut off is asked again.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable
from typing import Any

from grpo_ray.actors.staleness import admission_limit, oldest_allowed, places_beyond
from grpo_ray.config import Config
from grpo_ray.errors import RunError
from grpo_ray.run.generator_pool import Rollouts
from grpo_ray.run.open_calls import Watch
from grpo_ray.tasks.prompt_ledger import PromptLedger
from grpo_ray.telemetry.run_log import RunLog
from grpo_ray.types import BatchFacts, PromptItem, PutReceipt

Running = tuple["asyncio.Task[None]", int]  # a group's rollout, and the published version when it began


class Production:
    """`begin`, then `run` beside the training, which says what it took and waits for what it needs."""

    def __init__(
        self,
        config: Config,
        ledger: PromptLedger,
        rollouts: Rollouts,
        actors: Any,
        watch: Watch,
        log: RunLog,
        version: int,
    ) -> None:
        self._config, self._ledger, self._rollouts = config, ledger, rollouts
        self._actors, self._watch, self._log = actors, watch, log
        self._tasks: asyncio.TaskGroup | None = None
        self._mine: set[asyncio.Task[None]] = set()
        self._running: dict[int, Running] = {}  # by group, while it is sampled and scored
        self._scored: set[int] = set()  # on their way into the buffer, which may keep them waiting
        self._finished = asyncio.Condition()
        self._admitted_version = version
        self._oldest_useful = 0  # what is sampled by older versions is cut off
        self._extra_places = 0  # see actors/staleness.py
        self._num_set_aside = self._num_cut = 0  # since the last batch

    @property
    def published_version(self) -> int:
        """The newest that admission has told of."""
        return self._admitted_version

    async def begin(self, version: int, is_resumed: bool) -> None:
        """The ledger is what it was at `version`; the buffer has the groups that were buffered then."""
        ledger = self._ledger
        self._extra_places = places_beyond(
            version,
            ledger.num_trained,
            ledger.num_left,
            self._config.num_oversampled,
            self._config.fresh_per_step,
        )
        if is_resumed:
            places = await self._actors.buffer.begin(sorted(ledger.unfinished), ledger.next_group_id)
            await self.give_places(places)

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Produce in this group of tasks; an error ends it."""
        self._tasks = tasks
        self._mine.add(tasks.create_task(self._run()))

    def cancel(self) -> None:
        for task in self._mine:
            task.cancel()

    async def _run(self) -> None:
        """Dispatch prompts as admission allows, without end; the last steps' batches need no successors."""
        version, limit = -1, 0
        while True:
            version, limit = await self._actors.weight_sync.admission(version, limit)
            self._admitted_version = version
            self._ask_again()
            num_new = min(limit, self._num_groups) - self._ledger.next_group_id
            self._dispatch(self._ledger.take_new(max(0, num_new)))

    def _ask_again(self) -> None:
        """Dispatch what waits, unless it would be cut off once more; then the next version will do it."""
        if self._admitted_version >= self._oldest_useful:
            self._dispatch(self._ledger.take_waiting())

    async def settle_batch(self, step: int, facts: BatchFacts) -> dict[str, float]:
        """The batch of `step` was taken: places that it left are given away, and whoever is late is cut off."""
        await self.give_places(facts.num_places)
        metrics: dict[str, float] = {}
        if self._config.num_oversampled:
            self._cut(facts.cut_ids)
            self._cut_off_running(step)
            self._ask_again()
            await self._notify_finished()
            metrics["rollout/cut_groups"] = self._num_cut
        self._num_set_aside = self._num_cut = 0
        return metrics

    def sample_again(self, group_ids: Collection[int]) -> None:
        """These were refused as too old."""
        self._ledger.give_back(group_ids)
        self._dispatch(self._ledger.take_waiting())

    @property
    def _num_groups(self) -> int:
        """As many as the run dispatches in all, unless more leave the line without being trained."""
        return self._config.algorithm.num_steps * self._config.fresh_per_step + self._extra_places

    def _dispatch(self, items: Iterable[PromptItem]) -> None:
        assert self._tasks is not None
        for item in items:
            task = self._tasks.create_task(self._rollout(item))
            self._running[item.group_id] = task, self._admitted_version
            self._mine.add(task)
            task.add_done_callback(self._mine.discard)

    async def _rollout(self, item: PromptItem) -> None:
        """One group: sampled, scored, put into the buffer; only references pass through here."""
        group_id = item.group_id
        scored = await self._rollouts.sample(item, self._config.algorithm.samples_per_prompt, "train")
        task, _ = self._running.get(group_id, (None, 0))
        if task is not asyncio.current_task():  # cut off as its answer came
            return
        del self._running[group_id]  # from here on it is not cut off
        if scored is None:
            await self._set_aside(group_id)
        else:
            self._scored.add(group_id)
            await self._notify_finished()
            with self._watch.call("buffer", f"takes in group {group_id}", is_waiting=True):
                receipt: PutReceipt = await self._actors.buffer.put(scored)
            self._scored.remove(group_id)
            if receipt.is_kept:
                self._ledger.mark_buffered(group_id)
            else:
                self._cut([group_id])
                self._ask_again()
            await self.give_places(receipt.num_places)
        await self._notify_finished()

    async def _set_aside(self, group_id: int) -> None:
        """It never finished, however often it was tried: its place goes to another prompt."""
        self._ledger.mark_set_aside(group_id)
        self._num_set_aside += 1
        text = f"group {group_id} is set aside; another takes its place"
        self._log.event("set_aside", None, text, group_id=group_id)
        if self._num_set_aside >= self._config.algorithm.prompts_per_step:
            raise RunError(
                f"{self._num_set_aside} groups were set aside while one batch was waited for, as many as it "
                f"has; see {self._log.run.events_path}"
            )
        await self.give_places(1 + await self._actors.buffer.set_aside(group_id))

    async def give_places(self, num_places: int) -> None:
        """So many groups will not be trained: as many more are admitted."""
        if num_places:
            self._extra_places += num_places
            await self._actors.weight_sync.widen(num_places)

    def _cut(self, group_ids: Collection[int]) -> None:
        """These came too late to be trained; they are asked again when the next version is published."""
        self._ledger.cut(group_ids)
        self._num_cut += len(group_ids)

    def _cut_off_running(self, step: int) -> None:
        """After the batch of `step` was taken: whoever runs and would be too old for the next one."""
        self._oldest_useful = oldest = oldest_allowed(step + 1, self._config.weight_sync.max_lag)
        late = [group_id for group_id, (_, version) in self._running.items() if version < oldest]
        for group_id in late:
            self._running.pop(group_id)[0].cancel()
        self._cut(late)

    async def _notify_finished(self) -> None:
        async with self._finished:
            self._finished.notify_all()

    async def until_none_runs(self, published_version: int) -> None:
        """Wait until every group that `published_version` lets in is scored, set aside, or cut off."""
        max_lag = self._config.weight_sync.max_lag - self._config.steps_overtaken

        def none_runs() -> bool:
            limit = admission_limit(published_version, max_lag, self._config.fresh_per_step, self._extra_places)
            is_dispatched = self._ledger.next_group_id >= min(limit, self._num_groups)
            return is_dispatched and self._ledger.in_flight <= self._scored

        await self._until_finished(none_runs)

    async def until_answered(self, group_ids: set[int]) -> None:
        await self._until_finished(lambda: not group_ids & self._scored)

    async def _until_finished(self, condition: Callable[[], bool]) -> None:
        """Wait for what can become true when a group's rollout has ended."""
        async with self._finished:
            await self._finished.wait_for(condition)
