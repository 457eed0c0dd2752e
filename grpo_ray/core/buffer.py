"""TrajectoryBuffer: the bytes of scored groups until they are trained, and of groups to replay."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from grpo_ray.config import Config
from grpo_ray.core.replay import ReplayedGroup, ReplayMemory
from grpo_ray.core.staleness import version_trained_at
from grpo_ray.records.checkpoint import GROUPS, REPLAY
from grpo_ray.records.rollout_log import DROPPED, FRESH, read_groups, read_uses, write_rollouts
from grpo_ray.types import BatchFacts, GroupFacts, RolloutGroup, ScoredGroup, TrainBatch, Verdict
from grpo_ray.watch.batch_metrics import cut_metrics, rollout_metrics, teacher_metrics, ungraded_in
from grpo_ray.watch.rollout_writer import RolloutWriter
from grpo_ray.watch.stage_clock import ClockedActor, StageClock

STAGES = ("write_rollouts", "write_checkpoint", "make_batch")


class TrajectoryBuffer(ClockedActor):
    """The bytes of scored groups, by id, and the memory of replayed ones; the GroupBook chooses each batch."""

    _has_children = False

    def __init__(
        self, config: Config, rollouts_folder: Path | None = None, checkpoint: Path | None = None
    ) -> None:
        """
        Args:
            rollouts_folder: receives the rollouts of every batch.
            checkpoint: the training folder to restore from.
        """
        self._memory = ReplayMemory(config.buffer.replay, config.replayed_per_step, config.run.seed)
        self._masks_old = config.episodes.over_age == "mask"
        self._sampling_metric = config.algorithm.dynamic_sampling_metric
        self._groups: dict[int, ScoredGroup] = {}  # in the order of their arrival
        self._captured: tuple[tuple[ScoredGroup, ...], tuple[ReplayedGroup, ...]] = (), ()
        self._clock = StageClock(STAGES, rest="wait_for_groups")
        self._writer = RolloutWriter(rollouts_folder, int(config.buffer.max_gib * 2**30), self._clock)
        if checkpoint is not None:
            self._restore(checkpoint)

    async def begin(self, group_ids: Sequence[int]) -> dict[int, GroupFacts]:
        """Keep only those of the restored groups that may still be trained; return their facts, by id."""
        kept = set(group_ids)
        self._memory.forget(kept)  # a batch that was taken but not trained
        await self.drop([group_id for group_id in self._groups if group_id not in kept])
        return {group_id: group.facts_for(self._sampling_metric) for group_id, group in self._groups.items()}

    async def put(
        self, rollout: RolloutGroup, verdict: Verdict, teacher_logprobs: np.ndarray | None = None
    ) -> None:
        """Add a scored group; raises ValueError if it is in the buffer already."""
        group = ScoredGroup.of(rollout, verdict, teacher_logprobs)
        if group.group_id in self._groups:
            raise ValueError(f"group {group.group_id} came twice")
        self._groups[group.group_id] = group

    async def drop(self, group_ids: Sequence[int]) -> None:
        """Discard groups that will be sampled again."""
        for group_id in group_ids:
            del self._groups[group_id]

    async def take(
        self, step: int, group_ids: Sequence[int], dropped_ids: Sequence[int], oldest_version: int
    ) -> tuple[TrainBatch, BatchFacts]:
        """Hand out the batch of `step`: these groups, then replayed ones.

        Args:
            dropped_ids: groups that leave for lack of signal; they are recorded with the batch.
            oldest_version: tokens of earlier ones are masked, in groups of episodes.
        """
        await self._writer.room()
        # No await from here on: a caller that is cancelled gets all of it or nothing.
        with self._clock.stage("make_batch", f"step {step}"):
            return self._hand_out(step, group_ids, dropped_ids, oldest_version)

    def _hand_out(
        self, step: int, group_ids: Sequence[int], dropped_ids: Sequence[int], oldest_version: int
    ) -> tuple[TrainBatch, BatchFacts]:
        num_masked = self._mask_older(group_ids, oldest_version)
        replayed = self._memory.draw(version_trained_at(step))  # before the fresh ones are added
        fresh = tuple(self._groups.pop(group_id) for group_id in group_ids)
        self._memory.add(fresh)
        dropped = tuple(self._groups.pop(group_id) for group_id in dropped_ids)
        write_error = self._writer.error
        uses = [FRESH] * len(fresh) + [r.num_uses for r in replayed] + [DROPPED] * len(dropped)
        self._writer.add(step, (*fresh, *(r.group for r in replayed), *dropped), uses)
        metrics = {
            **rollout_metrics([*fresh, *dropped], len(dropped)),
            **teacher_metrics(fresh),
            **cut_metrics(fresh),
            **self._memory.take_metrics(),
            **({"lag/masked_tokens": float(num_masked)} if self._masks_old else {}),
        }
        facts = BatchFacts(metrics, write_error, ungraded_in([*fresh, *dropped]), tuple(self._writer.notes))
        self._writer.notes.clear()
        return TrainBatch((*fresh, *(r.group for r in replayed))), facts

    def _mask_older(self, group_ids: Sequence[int], oldest_version: int) -> int:
        """Mask the tokens of these groups that are too old to be trained; return their number."""
        num_masked = 0
        for group in [self._groups[group_id] for group_id in group_ids]:
            if group.rollout.oldest_version < oldest_version:
                rollout = group.rollout.masked_before(oldest_version)
                num_masked += sum(c.num_tokens - int(np.count_nonzero(c.mask)) for c in rollout.completions)
                self._groups[group.group_id] = replace(group, rollout=rollout)
        return num_masked

    # Checkpoints

    async def capture(self, version: int) -> None:
        """Remember the groups held now, for `write_captured`.

        Args:
            version: the Learner's; the uses of a batch that was taken but not trained are not counted.
        """
        self._captured = tuple(self._groups.values()), self._memory.contents(version)

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
            self._writer.notes += filter(None, (first, second))
            return {name: (folder / name).stat().st_size for name in (GROUPS, REPLAY)}

    def _restore(self, folder: Path) -> None:
        self._groups = {group.group_id: group for group in read_groups(folder / GROUPS)}
        replay = folder / REPLAY
        groups, uses = read_groups(replay), read_uses(replay)
        self._memory.restore(ReplayedGroup(*pair) for pair in zip(groups, uses, strict=True))

    async def flush(self) -> str | None:
        """Wait until the batches taken so far are on disk; return the error if they cannot be (a full disk)."""
        return await self._writer.flush()
