"""TrajectoryBuffer: scored groups wait here until their batch is whole, and are kept to be replayed."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_ray.actors.batch_line import BatchLine
from grpo_ray.actors.replay import ReplayedGroup, ReplayMemory
from grpo_ray.actors.staleness import oldest_allowed
from grpo_ray.config import Config
from grpo_ray.telemetry.memory import resident_bytes
from grpo_ray.telemetry.rollout_log import DROPPED, FRESH, read_groups, read_uses, write_rollouts
from grpo_ray.telemetry.rollout_writer import RolloutWriter
from grpo_ray.telemetry.stage_clock import ActorStats, StageClock
from grpo_ray.types import BatchFacts, GroupOutcome, PutReceipt, ScoredGroup, TrainBatch

GROUPS, REPLAY = "groups.parquet", "replay.parquet"  # in a checkpoint's training folder
STAGES = ("write_rollouts", "write_checkpoint", "make_batch", "wait_for_groups")


class TrajectoryBuffer:
    """Hands out one batch after another, as the line and the replay memory make them up."""

    def __init__(
        self,
        line: BatchLine,
        memory: ReplayMemory,
        max_bytes: int,
        rollouts_folder: Path | None = None,
        checkpoint: Path | None = None,
        cut_max_lag: int | None = None,
    ) -> None:
        """Batches are written to `rollouts_folder`; `checkpoint` is the training folder to go on from.

        Args:
            cut_max_lag: cut off what comes too late: groups that the batch after the present one may not
                have at this lag are not kept.
        """
        self._line, self._memory = line, memory
        self._max_bytes = max_bytes
        self._cut_max_lag = cut_max_lag
        self._oldest_kept = 0
        self._groups: dict[int, ScoredGroup] = {}  # in the order in which they came
        self._has_signal: dict[int, bool] = {}  # of the same groups
        self._num_bytes = 0
        self._dropped: list[ScoredGroup] = []  # since the last batch
        self._changed = asyncio.Condition()
        self._captured: tuple[tuple[ScoredGroup, ...], tuple[ReplayedGroup, ...]] = (), ()
        self._clock = StageClock(STAGES, rest="wait_for_learner")
        self._writer = (
            None if rollouts_folder is None else RolloutWriter(rollouts_folder, max_bytes, self._clock)
        )
        if checkpoint is not None:
            self._restore(checkpoint)

    def __repr__(self) -> str:
        return f"TrajectoryBuffer({len(self._groups)} groups, {self._clock.current})"

    async def ready(self) -> bool:
        return True

    async def take_stats(self) -> ActorStats:
        """What happened since the last call."""
        return ActorStats(self._clock.take(), resident_bytes(with_children=False))

    async def begin(self, waiting: Sequence[int], next_id: int) -> int:
        """A run goes on: `waiting` groups are still to be trained, and all from `next_id` on.

        Returns the places that groups without signal left (as in PutReceipt).
        """
        async with self._changed:
            self._line.begin(waiting, next_id)
            self._memory.forget(waiting)  # a batch that was taken and then not trained
            return self._settle()

    async def put(self, group: ScoredGroup) -> PutReceipt:
        """Take the group in, when there is room: what the next batch waits for is never kept out.

        Raises:
            ValueError: the group is here already, or is not to be trained any more.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._has_room(group))
            if group.rollout.oldest_version < self._oldest_kept:
                return PutReceipt(is_kept=False)
            if group.group_id in self._groups:
                raise ValueError(f"group {group.group_id} came twice")
            if not self._line.holds(group.group_id):
                raise ValueError(f"group {group.group_id} came after it was trained, dropped or set aside")
            self._add(group)
            return PutReceipt(is_kept=True, num_places=self._settle())

    def _has_room(self, group: ScoredGroup) -> bool:
        is_awaited = self._line.is_awaited(group.group_id) or not self._line.holds(group.group_id)
        return is_awaited or self._num_bytes + group.num_bytes <= self._max_bytes

    async def set_aside(self, group_id: int) -> int:
        """This group will never come; returns the places that others left (as in PutReceipt)."""
        async with self._changed:
            self._line.leave([group_id])
            return self._settle()

    def _settle(self) -> int:
        """The line has changed: groups without signal leave it, and whoever waits looks again."""
        dropped = self._line.drop(self._has_signal)
        self._dropped += [self._remove(group_id) for group_id in dropped]
        self._changed.notify_all()
        return len(dropped)

    async def take(self, step: int, oldest_version: int) -> tuple[TrainBatch, BatchFacts]:
        """Wait for the batch of `step`, and hand it out.

        If any of its fresh groups holds a token older than `oldest_version`, those groups are given up, the
        rest stay, and the batch comes back empty with their ids in `rejected_ids`: sample them again, then
        take again.
        """
        if self._writer is not None:
            await self._writer.room()
        async with self._changed:
            with self._clock.stage("wait_for_groups", f"step {step + 1}"):
                group_ids = await self._changed.wait_for(lambda: self._line.batch(self._groups))
            assert group_ids is not None  # what was waited for
            with self._clock.stage("make_batch", f"step {step + 1}"):
                return self._hand_out(step, group_ids, oldest_version)

    def _hand_out(
        self, step: int, group_ids: tuple[int, ...], oldest_version: int
    ) -> tuple[TrainBatch, BatchFacts]:
        """Awaits nothing: a caller that gives up has the whole batch, or none of it."""
        write_error = self._writer.error if self._writer is not None else None
        rejected = self._remove_older([self._groups[g] for g in group_ids], oldest_version)
        if rejected:
            self._changed.notify_all()  # there is room
            return TrainBatch(()), BatchFacts((), rejected, {}, write_error=write_error)
        fresh, replayed, dropped = self._make_batch(step, group_ids)
        cut = self._cut(step)
        num_places = self._settle()
        if self._writer is not None:
            uses = [FRESH] * len(fresh) + [r.num_uses for r in replayed] + [DROPPED] * len(dropped)
            self._writer.add(step + 1, (*fresh, *(r.group for r in replayed), *dropped), uses)
        metrics = {
            **rollout_metrics([*fresh, *dropped], len(dropped)),
            **part_metrics([*fresh, *dropped]),
            **cut_metrics(fresh),
            **self._memory.take_metrics(),
            "buffer/groups": float(len(self._groups)),
            "buffer/bytes": float(self._num_bytes),
        }
        dropped_ids = tuple(group.group_id for group in dropped)
        outcomes = group_outcomes([*fresh, *dropped])
        facts = BatchFacts(group_ids, (), metrics, dropped_ids, cut, num_places, outcomes, write_error)
        return TrainBatch((*fresh, *(r.group for r in replayed))), facts

    def _make_batch(
        self, step: int, group_ids: Sequence[int]
    ) -> tuple[tuple[ScoredGroup, ...], tuple[ReplayedGroup, ...], tuple[ScoredGroup, ...]]:
        """The batch's fresh groups, those that are replayed, and those that were dropped on the way to it."""
        replayed = self._memory.draw(step)  # before the fresh ones are in it
        fresh = tuple(self._remove(group_id) for group_id in group_ids)
        self._memory.add(fresh)
        self._line.train(group_ids)
        dropped = tuple(sorted(self._dropped, key=lambda group: group.group_id))
        self._dropped = []
        return fresh, replayed, dropped

    def _cut(self, step: int) -> tuple[int, ...]:
        """Groups that came too late for this batch, and would be too old for the next one."""
        if self._cut_max_lag is None:
            return ()
        self._oldest_kept = oldest_allowed(step + 1, self._cut_max_lag)
        return self._remove_older(list(self._groups.values()), self._oldest_kept)

    def _remove_older(self, groups: Sequence[ScoredGroup], oldest_version: int) -> tuple[int, ...]:
        stale = [group.group_id for group in groups if group.rollout.oldest_version < oldest_version]
        return tuple(self._remove(group_id).group_id for group_id in stale)

    def _add(self, group: ScoredGroup) -> None:
        self._groups[group.group_id] = group
        self._has_signal[group.group_id] = group.has_signal
        self._num_bytes += group.num_bytes

    def _remove(self, group_id: int) -> ScoredGroup:
        group = self._groups.pop(group_id)
        del self._has_signal[group_id]
        self._num_bytes -= group.num_bytes
        return group

    # For a checkpoint

    async def group_ids(self) -> tuple[int, ...]:
        """The groups held now, in order; those that were dropped since the last batch are among them."""
        return tuple(sorted([*self._groups, *(group.group_id for group in self._dropped)]))

    async def capture(self, version: int) -> tuple[int, ...]:
        """Remember the groups held now, for `write_captured`; returns their ids.

        Of a batch that was taken and that the Learner, at `version`, has not trained, no use is counted.
        """
        group_ids = await self.group_ids()
        self._captured = (*self._groups.values(), *self._dropped), self._memory.contents(version)
        return group_ids

    async def write_captured(self, folder: Path) -> None:
        """Write the remembered groups, which then are forgotten, to a checkpoint's training folder.

        Raises:
            OSError: they could not be written.
        """
        (groups, replayed), self._captured = self._captured, ((), ())
        groups = tuple(sorted(groups, key=lambda group: group.group_id))
        uses = [r.num_uses for r in replayed]
        write = asyncio.to_thread
        with self._clock.stage("write_checkpoint"):
            await write(write_rollouts, folder / GROUPS, None, groups, fsync=True)
            await write(write_rollouts, folder / REPLAY, None, [r.group for r in replayed], uses, fsync=True)

    def _restore(self, folder: Path) -> None:
        for group in read_groups(folder / GROUPS):
            self._add(group)
        replay = folder / REPLAY
        if not replay.exists():  # a checkpoint of an older version of grpo_ray
            return
        groups, uses = read_groups(replay), read_uses(replay)
        self._memory.restore(ReplayedGroup(*pair) for pair in zip(groups, uses, strict=True))

    async def flush(self) -> str | None:
        """Wait until the batches taken so far are written; returns why they are not, as on a full disk."""
        return None if self._writer is None else await self._writer.flush()


def buffer_arguments(config: Config, rollouts_folder: Path | None, checkpoint: Path | None) -> tuple[Any, ...]:
    """What TrajectoryBuffer is made of, as the configuration wants it."""
    is_cut = config.num_oversampled > 0
    line = BatchLine(
        config.fresh_per_step,
        config.buffer.lookahead,
        first_come=is_cut,
        max_dropped=config.algorithm.dynamic_sampling_tries * config.fresh_per_step,
    )
    memory = ReplayMemory(config.buffer.replay, config.replayed_per_step, config.run.seed)
    max_bytes = int(config.buffer.max_gib * 2**30)
    cut_max_lag = config.weight_sync.max_lag if is_cut else None
    return line, memory, max_bytes, rollouts_folder, checkpoint, cut_max_lag


def rollout_metrics(groups: Sequence[ScoredGroup], num_dropped: int = 0) -> dict[str, float]:
    """What the rewards and responses of a step's own groups look like; those that were dropped count."""
    completions = [completion for group in groups for completion in group.rollout.completions]
    lengths = np.array([len(completion.token_ids) for completion in completions])
    means = np.array([group.rewards.mean() for group in groups])
    return {
        "reward/mean": float(means.mean()),
        "reward/format": float(np.mean([group.format_rewards.mean() for group in groups])),
        "reward/answer": float(np.mean([group.answer_rewards.mean() for group in groups])),
        "reward/errors": float(sum(group.num_errors for group in groups)),
        "reward/baseline_variance": float(np.mean([baseline_variance(group.rewards) for group in groups])),
        "rollout/response_tokens/mean": float(lengths.mean()),
        "rollout/response_tokens/max": float(lengths.max()),
        "rollout/truncated_frac": float(np.mean([c.is_truncated for c in completions])),
        "rollout/zero_variance_groups": float(sum(not group.has_signal for group in groups)),
        "rollout/dropped_groups": float(num_dropped),
    }


def part_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """The mean reward of each part of a mixture that is among the groups."""
    by_part: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        by_part[group.rollout.item.task].append(float(group.rewards.mean()))
    return {f"reward/mean/{part}": float(np.mean(means)) for part, means in sorted(by_part.items()) if part}


def group_outcomes(groups: Sequence[ScoredGroup]) -> dict[int, GroupOutcome]:
    """Of each group of which something was graded, how it came out."""
    outcomes = {group.group_id: group.outcome for group in groups}
    return {group_id: outcome for group_id, outcome in outcomes.items() if outcome is not None}


def baseline_variance(rewards: np.ndarray) -> float:
    """Estimated variance of a group's mean reward, which is its baseline: s^2 / G, from `[G]` rewards."""
    return float(rewards.var(ddof=1) / len(rewards)) if len(rewards) > 1 else 0.0


def cut_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """How much longer the responses are to prompts that were cut off before: what the cut selects against."""

    def mean_tokens(was_cut: bool) -> float:
        chosen = [g.rollout for g in groups if (g.rollout.item.num_cuts > 0) == was_cut]
        lengths = [len(c.token_ids) for rollout in chosen for c in rollout.completions]
        return float(np.mean(lengths)) if lengths else 0.0

    first_time, cut_before = mean_tokens(was_cut=False), mean_tokens(was_cut=True)
    if not first_time or not cut_before:
        return {}
    return {"rollout/response_tokens/cut_before_ratio": cut_before / first_time}
