"""TrajectoryBuffer: scored groups wait here until their batch is whole (FIFO in group order)."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from grpo_ray.telemetry.rollout_log import write_rollouts
from grpo_ray.telemetry.run_files import step_name
from grpo_ray.types import BatchFacts, PromptItem, ScoredGroup, TrainBatch


class TrajectoryBuffer:
    """Hands out the batch of step k: groups `[k * prompts_per_step, (k + 1) * prompts_per_step)`.

    Whatever order groups arrive in, batches are the same: one slow group is waited for, never overtaken.
    """

    def __init__(self, prompts_per_step: int, rollouts_folder: Path | None = None) -> None:
        self._prompts_per_step = prompts_per_step
        self._rollouts_folder = rollouts_folder
        self._groups: dict[int, ScoredGroup] = {}
        self._arrived = asyncio.Condition()

    async def ready(self) -> bool:
        return True

    async def put(self, group: ScoredGroup) -> None:
        async with self._arrived:
            if group.group_id in self._groups:
                raise ValueError(f"group {group.group_id} came twice")
            self._groups[group.group_id] = group
            self._arrived.notify_all()

    async def take(self, step: int, oldest_version: int) -> tuple[TrainBatch, BatchFacts]:
        """Wait for the batch of `step`, and hand it out.

        If any of its groups holds a token older than `oldest_version`, those groups are dropped, the rest
        stay, and the batch comes back empty with the dropped prompts in `rejected_items`: sample them
        again, then take again.
        """
        first = step * self._prompts_per_step
        group_ids = range(first, first + self._prompts_per_step)
        async with self._arrived:
            await self._arrived.wait_for(lambda: all(g in self._groups for g in group_ids))
            rejected = self._drop_stale(group_ids, oldest_version)
            if rejected:
                return TrainBatch(()), BatchFacts((), rejected, {})
            groups = tuple(self._groups.pop(g) for g in group_ids)
        if self._rollouts_folder is not None:
            path = self._rollouts_folder / f"{step_name(step + 1)}.parquet"
            await asyncio.to_thread(write_rollouts, path, step + 1, groups)
        metrics = {**rollout_metrics(groups), "buffer/groups": float(len(self._groups))}
        return TrainBatch(groups), BatchFacts(tuple(group_ids), (), metrics)

    def _drop_stale(self, group_ids: range, oldest_version: int) -> tuple[PromptItem, ...]:
        stale = [g for g in group_ids if self._groups[g].rollout.oldest_version < oldest_version]
        return tuple(self._groups.pop(g).rollout.item for g in stale)


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
