"""The producer of groups: GroupBook -> prompts -> GeneratorPool -> the buffer.

It does what the GroupBook decides (core/groups.py): it has each admitted group sampled, scored and buffered,
in one task per group, cancels what is cut off, and has the buffer discard what will be sampled again.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Any

from grpo_ray.core.context import RunContext
from grpo_ray.core.groups import Batch, GroupBook, State
from grpo_ray.core.pool import GeneratorPool
from grpo_ray.errors import DataLost, RunError
from grpo_ray.types import PromptItem
from grpo_ray.watch.event_loop import Changes
from grpo_ray.watch.run_log import Metrics

SLICE = 1000  # groups dispatched at a time


class RolloutProducer:
    """The producer of groups, in parallel with training: call `begin`, then `run`.

    The controller asks for each batch with `next_batch`, and reports each trained step and published version.
    """

    def __init__(self, context: RunContext, book: GroupBook, pool: GeneratorPool) -> None:
        self._config, self._calls, self._log = context.config, context.calls, context.log
        self._actors, self._book, self._pool = context.actors, book, pool
        self._sampling: dict[int, asyncio.Task[None]] = {}  # by group, while it can be cut off
        self._num_losses: Counter[int] = Counter()  # of groups, on their way into the buffer
        self._progress = Changes()  # of any group, or of the published version
        self._room = Changes()  # in the buffer
        self._is_held = False  # nothing is dispatched during a sync that no request may span

    async def begin(self, book_state: Mapping[str, Any] | None) -> None:
        """Start from the book as it was at a checkpoint, with the groups that the restored buffer holds."""
        if book_state is not None:
            held = await self._actors.buffer.begin([*book_state["in_flight"], *book_state["buffered"]])
            self._book.load_state_dict(book_state, held)

    async def run(self, tasks: asyncio.TaskGroup) -> None:
        """Dispatch what the book admits in this task group, until cancelled; an error ends the group.

        Consumes admitted groups; produces one task per group. Waits for the buffer to discard the bytes of
        groups before they are dispatched again. Unblocked by a new version, an extra slot, a group that waits.
        """
        book = self._book
        while True:
            await self._progress.until(lambda: book.discarded or self._may_dispatch())
            while discarded := book.take_discarded():
                with self._calls.call("buffer", "discards groups that came too late"):
                    await self._actors.buffer.drop(discarded)
            if self._may_dispatch():
                for item in book.admit(SLICE):
                    self._sampling[item.group_id] = tasks.create_task(self._produce(item))
                await asyncio.sleep(0)  # the first ones are sampled, and a signal is answered

    def _may_dispatch(self) -> bool:
        return not self._is_held and self._book.num_admissible > 0

    # One group

    async def _produce(self, item: PromptItem) -> None:
        """Have one group sampled, scored and buffered; only references pass through this process."""
        book, group_id = self._book, item.group_id
        task = asyncio.current_task()

        def is_current() -> bool:
            return self._sampling.get(group_id) is task

        def begin() -> None:
            if is_current():
                book.sampling(group_id)

        scored = await self._pool.sample(item, self._config.algorithm.samples_per_prompt, "train", begin)
        if not is_current():  # it was cut off just as its answer arrived
            return
        del self._sampling[group_id]
        if scored is None:
            self._set_aside(group_id)
            return
        group, verdict, logprobs = scored
        assert verdict.facts is not None, "a Scorer states them"
        book.scored(group_id, verdict.facts)
        self._progress.announce()
        try:
            with self._calls.call("buffer", f"takes in group {group_id}", is_waiting=True):
                await self._room.until(lambda: book.enter(group_id))
                await self._actors.buffer.put(group, verdict, logprobs)
            self._num_losses.pop(group_id, None)
            makes_room = book.buffered(group_id)
        except DataLost as error:  # with its Generator, before the buffer had fetched it
            self._num_losses[group_id] += 1
            if self._num_losses[group_id] > self._config.recovery.max_group_losses:
                raise  # the fault is the buffer's
            book.lost([group_id])
            makes_room = True
            self._log.event("group_lost", None, f"group {group_id}: {error}")
        self._progress.announce()
        if makes_room:  # else each group would wake all that wait for room
            self._room.announce()

    def _set_aside(self, group_id: int) -> None:
        """Give up a group that never finished, despite retries."""
        self._book.set_aside(group_id)
        text = f"group {group_id} is set aside; another takes its place"
        self._log.event("set_aside", None, text, group_id=group_id)
        if (num := self._book.num_set_aside) >= self._config.algorithm.prompts_per_step:
            raise RunError(
                f"{num} groups, as many as a batch has, were set aside while the run waited for one batch; see "
                f"{self._log.run.events_path}"
            )
        self._changed()

    def _changed(self) -> None:
        """Wake all that wait for groups, and for room: the order of batches may have changed."""
        self._progress.announce()
        self._room.announce()

    # The controller's requests and reports

    async def next_batch(self, step: int) -> Batch:
        """Wait for the batch of `step` to be complete; cancel what would come too late for the next one."""
        with self._calls.call("buffer", f"waits for the groups of step {step}", is_waiting=True):
            batch = await self._progress.until(lambda: self._choose(step))
        for group_id in batch.late_ids:
            self._sampling.pop(group_id).cancel()
        self._changed()
        return batch

    def _choose(self, step: int) -> Batch | None:
        batch = self._book.batch(step)
        if batch is None and self._book.discarded:  # groups were refused: `run` dispatches them again
            self._changed()
        return batch

    def step_trained(self, step: int) -> Metrics:
        """Account for a trained batch, and return metrics of the prompts."""
        self._book.trained(step)
        return self._book.metrics()

    def published(self, version: int) -> None:
        """Open admission for a version that every serving Generator runs."""
        self._book.publish(version)
        self._progress.announce()

    @contextlib.asynccontextmanager
    async def drained(self) -> AsyncIterator[None]:
        """Wait until every admitted group is scored, set aside or cut off, and dispatch none in the block."""
        book = self._book
        await self._progress.until(lambda: not (book.num_admissible or book.num_in(State.IN_FLIGHT)))
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
            self._progress.announce()
