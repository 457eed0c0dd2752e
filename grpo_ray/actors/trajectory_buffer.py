"""TrajectoryBuffer: scored groups until their batch is complete, and groups to replay."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from grpo_ray.actors.batch_queue import BatchQueue
from grpo_ray.actors.replay import ReplayedGroup, ReplayMemory
from grpo_ray.actors.staleness import oldest_allowed, version_trained_at
from grpo_ray.config import Config
from grpo_ray.config.algorithm import SamplingMetric
from grpo_ray.telemetry.batch_metrics import (
    cut_metrics,
    group_outcomes,
    part_metrics,
    rollout_metrics,
    teacher_metrics,
    ungraded_in,
)
from grpo_ray.telemetry.memory import resident_bytes
from grpo_ray.telemetry.rollout_log import DROPPED, FRESH, read_groups, read_uses, write_rollouts
from grpo_ray.telemetry.rollout_writer import RolloutWriter
from grpo_ray.telemetry.stage_clock import ActorStats, StageClock
from grpo_ray.types import (
    BatchFacts,
    PutReceipt,
    RolloutGroup,
    ScoredGroup,
    TrainBatch,
    Verdict,
    bulk_and_facts,
)

GROUPS, REPLAY = "groups.parquet", "replay.parquet"  # in a checkpoint's training folder
STAGES = ("write_rollouts", "write_checkpoint", "make_batch", "wait_for_groups")


class TrajectoryBuffer:
    """The buffer of scored groups; it hands out one batch after another, chosen by the queue and the memory."""

    def __init__(
        self,
        queue: BatchQueue,
        memory: ReplayMemory,
        max_bytes: int,
        rollouts_folder: Path | None = None,
        checkpoint: Path | None = None,
        cut_max_lag: int | None = None,
        masks_old: bool = False,
        sampling_metric: SamplingMetric = "advantage",
    ) -> None:
        """
        Args:
            rollouts_folder: receives the rollouts of every batch.
            checkpoint: the training folder to restore from.
            cut_max_lag: if given, groups that would be older than this lag in the next batch are cut off.
            masks_old: keep old groups of episodes, and mask their old tokens.
            sampling_metric: the signal without which a group may be dropped.
        """
        self._queue, self._memory = queue, memory
        self._max_bytes = max_bytes
        self._cut_max_lag = cut_max_lag
        self._masks_old = masks_old
        self._sampling_metric = sampling_metric
        self._oldest_kept = 0
        self._groups: dict[int, ScoredGroup] = {}  # in the order of their arrival
        self._has_signal: dict[int, bool] = {}  # of the same groups
        self._num_bytes = 0
        self._dropped: list[ScoredGroup] = []  # since the last batch
        lock = asyncio.Lock()
        self._changed, self._room = asyncio.Condition(lock), asyncio.Condition(lock)  # for `take`, for `put`
        self._captured: tuple[tuple[ScoredGroup, ...], tuple[ReplayedGroup, ...]] = (), ()
        self._clock = StageClock(STAGES, rest="wait_for_learner")
        self._writer = (
            None if rollouts_folder is None else RolloutWriter(rollouts_folder, max_bytes, self._clock)
        )
        self._notes: list[str] = [] if self._writer is None else self._writer.notes
        if checkpoint is not None:
            self._restore(checkpoint)

    def __repr__(self) -> str:
        return f"TrajectoryBuffer({len(self._groups)} groups, {self._clock.current})"

    async def ready(self) -> bool:
        return True

    async def take_stats(self) -> ActorStats:
        """Return the stage times since the last call, and the process's memory."""
        return ActorStats(self._clock.take(), resident_bytes(with_children=False))

    async def begin(self, waiting: Sequence[int], next_id: int) -> int:
        """Restore the order of a resumed run; return the slots to add (as in PutReceipt).

        Args:
            waiting: groups that are still to be trained; so are all from `next_id` on.
        """
        async with self._changed:
            self._queue.begin(waiting, next_id)
            self._memory.forget(waiting)  # a batch that was taken but not trained
            return self._settle()

    async def put(
        self, rollout: RolloutGroup, verdict: Verdict, teacher_logprobs: np.ndarray | None = None
    ) -> PutReceipt:
        """Add a scored group once there is room; a group that the next batch waits for is added at once.

        Raises:
            ValueError: the group is in the buffer already, or is no longer to be trained.
        """
        group = ScoredGroup.of(rollout, verdict, teacher_logprobs)
        async with self._room:
            await self._room.wait_for(lambda: self._has_room(group))
            if self._is_too_old(group, self._oldest_kept):
                return PutReceipt(is_kept=False)
            if group.group_id in self._groups:
                raise ValueError(f"group {group.group_id} came twice")
            if not self._queue.holds(group.group_id):
                raise ValueError(f"group {group.group_id} came after it was trained, dropped or set aside")
            self._add(group)
            return PutReceipt(is_kept=True, num_slots=self._settle(makes_room=False))

    def _has_room(self, group: ScoredGroup) -> bool:
        is_awaited = self._queue.is_awaited(group.group_id) or not self._queue.holds(group.group_id)
        return is_awaited or self._num_bytes + group.num_bytes <= self._max_bytes

    async def set_aside(self, group_id: int) -> int:
        """Remove a group that will never come; return the slots to add (as in PutReceipt)."""
        async with self._changed:
            self._queue.leave([group_id])
            return self._settle()

    def _settle(self, makes_room: bool = True) -> int:
        """Drop groups without signal after the queue has changed, and wake the calls that this may concern."""
        dropped = self._queue.drop(self._has_signal)
        self._dropped += [self._remove(group_id) for group_id in dropped]
        self._changed.notify_all()
        if makes_room or dropped:  # otherwise every group would wake all that wait for room
            self._room.notify_all()
        return len(dropped)

    @bulk_and_facts
    async def take(self, step: int, oldest_version: int) -> tuple[TrainBatch, BatchFacts]:
        """Wait for the batch of `step`, and hand it out.

        If any of its fresh groups holds a token older than `oldest_version`, those groups are discarded, the
        others stay, and an empty batch is returned with the discarded ids in `rejected_ids`: sample those
        again, then take again.
        """
        if self._writer is not None:
            await self._writer.room()
        async with self._changed:
            with self._clock.stage("wait_for_groups", f"step {step}"):
                group_ids = await self._changed.wait_for(lambda: self._queue.batch(self._groups))
            assert group_ids is not None  # what was waited for
            with self._clock.stage("make_batch", f"step {step}"):
                return self._hand_out(step, group_ids, oldest_version)

    def _hand_out(
        self, step: int, group_ids: tuple[int, ...], oldest_version: int
    ) -> tuple[TrainBatch, BatchFacts]:
        """Hand out the batch without awaiting, so that a caller that is cancelled gets all of it or nothing."""
        write_error = self._writer.error if self._writer is not None else None
        rejected = self._remove_older([self._groups[g] for g in group_ids], oldest_version)
        if rejected:
            self._room.notify_all()
            return TrainBatch(()), BatchFacts((), rejected, {}, write_error=write_error)
        num_masked = self._mask_older(group_ids, oldest_version)
        fresh, replayed, dropped = self._make_batch(version_trained_at(step), group_ids)
        cut = self._cut_for(step + 1)
        num_slots = self._settle()
        if self._writer is not None:
            uses = [FRESH] * len(fresh) + [r.num_uses for r in replayed] + [DROPPED] * len(dropped)
            self._writer.add(step, (*fresh, *(r.group for r in replayed), *dropped), uses)
        metrics = {
            **rollout_metrics([*fresh, *dropped], len(dropped)),
            **part_metrics([*fresh, *dropped]),
            **teacher_metrics(fresh),
            **cut_metrics(fresh),
            **self._memory.take_metrics(),
            **({"lag/masked_tokens": float(num_masked)} if self._masks_old else {}),
            "buffer/groups": float(len(self._groups)),
            "buffer/bytes": float(self._num_bytes),
        }
        dropped_ids = tuple(group.group_id for group in dropped)
        outcomes = group_outcomes([*fresh, *dropped])
        failed = ungraded_in([*fresh, *dropped])
        notes = tuple(self._notes)
        ids = group_ids, (), metrics, dropped_ids, cut
        facts = BatchFacts(*ids, num_slots, outcomes, write_error, failed, notes)
        self._notes.clear()
        return TrainBatch((*fresh, *(r.group for r in replayed))), facts

    def _make_batch(
        self, version: int, group_ids: Sequence[int]
    ) -> tuple[tuple[ScoredGroup, ...], tuple[ReplayedGroup, ...], tuple[ScoredGroup, ...]]:
        """Return the batch's fresh groups, its replayed groups, and the groups dropped since the last batch."""
        replayed = self._memory.draw(version)  # before the fresh ones are added
        fresh = tuple(self._remove(group_id) for group_id in group_ids)
        self._memory.add(fresh)
        self._queue.train(group_ids)
        dropped = tuple(sorted(self._dropped, key=lambda group: group.group_id))
        self._dropped = []
        return fresh, replayed, dropped

    def _cut_for(self, next_step: int) -> tuple[int, ...]:
        """Remove the groups that would be too old for the batch of `next_step`."""
        if self._cut_max_lag is None:
            return ()
        self._oldest_kept = oldest_allowed(version_trained_at(next_step), self._cut_max_lag)
        return self._remove_older(list(self._groups.values()), self._oldest_kept)

    def _remove_older(self, groups: Sequence[ScoredGroup], oldest_version: int) -> tuple[int, ...]:
        stale = [group.group_id for group in groups if self._is_too_old(group, oldest_version)]
        return tuple(self._remove(group_id).group_id for group_id in stale)

    def _is_too_old(self, group: ScoredGroup, oldest_version: int) -> bool:
        is_old = group.rollout.oldest_version < oldest_version
        return is_old and not (self._masks_old and group.rollout.is_of_episodes)

    def _mask_older(self, group_ids: Sequence[int], oldest_version: int) -> int:
        """Mask the tokens of these groups that are too old to be trained; return how many."""
        num_masked = 0
        for group in [self._groups[group_id] for group_id in group_ids]:
            if group.rollout.oldest_version < oldest_version:
                rollout = group.rollout.masked_before(oldest_version)
                num_masked += sum(c.num_tokens for c in group.rollout.completions)
                num_masked -= sum(c.num_tokens for c in rollout.completions)
                self._groups[group.group_id] = replace(group, rollout=rollout)
        return num_masked

    def _add(self, group: ScoredGroup) -> None:
        self._groups[group.group_id] = group
        self._has_signal[group.group_id] = group.varies_in(self._sampling_metric)
        self._num_bytes += group.num_bytes

    def _remove(self, group_id: int) -> ScoredGroup:
        group = self._groups.pop(group_id)
        del self._has_signal[group_id]
        self._num_bytes -= group.num_bytes
        return group

    # Checkpoints

    async def group_ids(self) -> tuple[int, ...]:
        """Return the groups held now, in order, including those dropped since the last batch."""
        return tuple(sorted([*self._groups, *(group.group_id for group in self._dropped)]))

    async def capture(self, version: int) -> tuple[int, ...]:
        """Remember the groups held now, for `write_captured`; return their ids.

        Args:
            version: the Learner's; the uses of a batch that was taken but not trained are not counted.
        """
        group_ids = await self.group_ids()
        self._captured = (*self._groups.values(), *self._dropped), self._memory.contents(version)
        return group_ids

    async def write_captured(self, folder: Path) -> dict[str, int]:
        """Write the remembered groups to a training folder, and forget them; return the files' sizes.

        Raises:
            OSError: they could not be written.
        """
        (groups, replayed), self._captured = self._captured, ((), ())
        groups = tuple(sorted(groups, key=lambda group: group.group_id))
        uses = [r.num_uses for r in replayed]
        write = asyncio.to_thread
        with self._clock.stage("write_checkpoint"):
            first = await write(write_rollouts, folder / GROUPS, None, groups, fsync=True)
            memory = [r.group for r in replayed]
            second = await write(write_rollouts, folder / REPLAY, None, memory, uses, fsync=True)
            self._notes += filter(None, (first, second))
            return {name: (folder / name).stat().st_size for name in (GROUPS, REPLAY)}

    def _restore(self, folder: Path) -> None:
        for group in read_groups(folder / GROUPS):
            self._add(group)
        replay = folder / REPLAY
        groups, uses = read_groups(replay), read_uses(replay)
        self._memory.restore(ReplayedGroup(*pair) for pair in zip(groups, uses, strict=True))

    async def flush(self) -> str | None:
        """Wait until the batches taken so far are on disk; return the error if they cannot be (a full disk)."""
        return None if self._writer is None else await self._writer.flush()


def buffer_arguments(config: Config, rollouts_folder: Path | None, checkpoint: Path | None) -> tuple[Any, ...]:
    """Return the arguments of TrajectoryBuffer for a configuration."""
    is_cut = config.num_oversampled > 0
    queue = BatchQueue(
        config.fresh_per_step,
        config.buffer.lookahead,
        first_come=is_cut,
        max_dropped=config.algorithm.dynamic_sampling_tries * config.fresh_per_step,
    )
    memory = ReplayMemory(config.buffer.replay, config.replayed_per_step, config.run.seed)
    max_bytes = int(config.buffer.max_gib * 2**30)
    cut_max_lag = config.weight_sync.max_lag if is_cut else None
    masks_old = config.episodes.over_age == "mask"
    metric = config.algorithm.dynamic_sampling_metric
    return queue, memory, max_bytes, rollouts_folder, checkpoint, cut_max_lag, masks_old, metric
