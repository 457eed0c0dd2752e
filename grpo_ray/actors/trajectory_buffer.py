"""TrajectoryBuffer: scored groups wait here until their batch is whole (FIFO in group order)."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from grpo_ray.telemetry.memory import resident_bytes
from grpo_ray.telemetry.rollout_log import read_groups, write_rollouts
from grpo_ray.telemetry.rollout_writer import RolloutWriter
from grpo_ray.types import BatchFacts, PromptItem, ScoredGroup, TrainBatch


class TrajectoryBuffer:
    """Hands out the batch of step k: groups `[k * prompts_per_step, (k + 1) * prompts_per_step)`.

    Whatever order groups arrive in, batches are the same: one slow group is waited for, never overtaken.
    """

    def __init__(
        self,
        prompts_per_step: int,
        max_bytes: int,
        rollouts_folder: Path | None = None,
        groups_path: Path | None = None,
    ) -> None:
        """Batches are written to `rollouts_folder`; `groups_path` is a checkpoint's, to begin with."""
        self._prompts_per_step = prompts_per_step
        self._max_bytes = max_bytes
        self._groups: dict[int, ScoredGroup] = {}
        self._num_bytes = 0
        self._set_aside: set[int] = set()
        self._step = 0  # whose batch is taken now, or next
        self._changed = asyncio.Condition()
        self._captured: tuple[ScoredGroup, ...] = ()
        self._writer = None if rollouts_folder is None else RolloutWriter(rollouts_folder, max_bytes)
        if groups_path is not None:
            for group in read_groups(groups_path):
                self._add(group)

    async def ready(self) -> bool:
        return True

    async def put(self, group: ScoredGroup) -> None:
        """Take the group in, when there is room: the batch that is taken now or next is never kept out.

        Raises:
            ValueError: the group is here already, or its batch has been taken.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._has_room(group))
            if group.group_id in self._set_aside:
                return
            if group.group_id in self._groups:
                raise ValueError(f"group {group.group_id} came twice")
            if group.group_id < self._step * self._prompts_per_step:
                raise ValueError(f"group {group.group_id} came after its batch was taken")
            self._add(group)
            self._changed.notify_all()

    def _has_room(self, group: ScoredGroup) -> bool:
        is_awaited = group.group_id < (self._step + 1) * self._prompts_per_step
        is_kept = group.group_id not in self._set_aside
        return is_awaited or not is_kept or self._num_bytes + group.num_bytes <= self._max_bytes

    async def set_aside(self, group_id: int) -> None:
        """This group will never come: its batch is handed out without it."""
        async with self._changed:
            self._set_aside.add(group_id)
            if group_id in self._groups:
                self._remove(group_id)
            self._changed.notify_all()

    async def take(self, step: int, oldest_version: int) -> tuple[TrainBatch, BatchFacts]:
        """Wait for the batch of `step`, and hand it out.

        If any of its groups holds a token older than `oldest_version`, those groups are dropped, the rest
        stay, and the batch comes back empty with the dropped prompts in `rejected_items`: sample them
        again, then take again. It is empty too when all of its groups were set aside.
        """
        first = step * self._prompts_per_step
        group_ids = range(first, first + self._prompts_per_step)
        memory = float(await asyncio.to_thread(resident_bytes))
        if self._writer is not None:
            await self._writer.room()
        async with self._changed:
            self._step = step
            self._changed.notify_all()  # groups of this batch are let in now
            await self._changed.wait_for(
                lambda: all(g in self._groups or g in self._set_aside for g in group_ids)
            )
            # From here on nothing is awaited: a caller that gives up has the whole batch, or none of it.
            self._changed.notify_all()  # there will be room
            write_error = self._writer.error if self._writer is not None else None
            rejected = self._drop_stale(group_ids, oldest_version)
            if rejected:
                return TrainBatch(()), BatchFacts((), rejected, {}, write_error)
            groups = tuple(self._remove(g) for g in group_ids if g in self._groups)
            self._step = step + 1
        if groups and self._writer is not None:
            self._writer.add(step + 1, groups)
        held = {
            "buffer/groups": float(len(self._groups)),
            "buffer/bytes": float(self._num_bytes),
            "memory/buffer_bytes": memory,
        }
        metrics = {**rollout_metrics(groups), **held} if groups else held
        return TrainBatch(groups), BatchFacts(tuple(g.group_id for g in groups), (), metrics, write_error)

    def _drop_stale(self, group_ids: range, oldest_version: int) -> tuple[PromptItem, ...]:
        present = [self._groups[g] for g in group_ids if g in self._groups]
        stale = [group.group_id for group in present if group.rollout.oldest_version < oldest_version]
        return tuple(self._remove(group_id).rollout.item for group_id in stale)

    def _add(self, group: ScoredGroup) -> None:
        self._groups[group.group_id] = group
        self._num_bytes += group.num_bytes

    def _remove(self, group_id: int) -> ScoredGroup:
        group = self._groups.pop(group_id)
        self._num_bytes -= group.num_bytes
        return group

    # For a checkpoint

    async def group_ids(self) -> tuple[int, ...]:
        """The groups held now, in order."""
        return tuple(sorted(self._groups))

    async def capture(self) -> tuple[int, ...]:
        """Remember the groups held now, for `write_captured`; returns their ids."""
        group_ids = tuple(sorted(self._groups))
        self._captured = tuple(self._groups[group_id] for group_id in group_ids)
        return group_ids

    async def write_captured(self, path: Path) -> None:
        """Write the remembered groups, which then are forgotten.

        Raises:
            OSError: they could not be written.
        """
        captured, self._captured = self._captured, ()
        await asyncio.to_thread(write_rollouts, path, None, captured, fsync=True)

    async def flush(self) -> str | None:
        """Wait until the batches taken so far are written; returns why they are not, as on a full disk."""
        return None if self._writer is None else await self._writer.flush()


def rollout_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """What the batch's rewards and responses look like."""
    completions = [completion for group in groups for completion in group.rollout.completions]
    lengths = np.array([len(completion.token_ids) for completion in completions])
    return {
        "reward/mean": float(np.mean([group.rewards.mean() for group in groups])),
        "reward/format": float(np.mean([group.format_rewards.mean() for group in groups])),
        "reward/answer": float(np.mean([group.answer_rewards.mean() for group in groups])),
        "reward/errors": float(sum(group.num_errors for group in groups)),
        "rollout/response_tokens/mean": float(lengths.mean()),
        "rollout/response_tokens/max": float(lengths.max()),
        "rollout/truncated_frac": float(np.mean([c.is_truncated for c in completions])),
        "rollout/zero_variance_groups": float(sum(not group.has_signal for group in groups)),
    }
