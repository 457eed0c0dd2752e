"""The TrajectoryBuffer: groups in, batches out, with and without replay and the rollouts' files."""

import asyncio
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.results import Options, Row
from benchmarks.tiny_learner import QUICKSTART, make_batch
from grpo_ray.config.loading import load_config
from grpo_ray.core.buffer import TrajectoryBuffer
from grpo_ray.types import PromptItem, RolloutGroup, ScoredGroup, Verdict

TITLE = "the buffer: a batch of groups in and out, with replay, with rollouts written"
PLAIN = "first in, first out"
REPLAY = ["buffer.replay.frac=0.5", "buffer.replay.max_age=4", "weight_sync.max_lag=1"]
VARIANTS: dict[str, tuple[list[str], bool]] = {  # overrides, and whether rollouts are written
    PLAIN: ([], False),
    "half of a batch replayed": (REPLAY, False),
    "rollouts written": ([], True),
}


def run(options: Options) -> list[Row]:
    return asyncio.run(_run(options))


async def _run(options: Options) -> list[Row]:
    common = ["algorithm.prompts_per_step=4"] if options.quick else []
    rounds = options.rounds or (2 if options.quick else 20)
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    with tempfile.TemporaryDirectory() as folder:
        buffers = {}
        for number, (name, (overrides, is_written)) in enumerate(VARIANTS.items()):
            config = load_config(QUICKSTART, [*common, *overrides])
            rollouts = Path(folder) / str(number)
            rollouts.mkdir()
            buffer = TrajectoryBuffer(config, rollouts if is_written else None)
            buffers[name] = config, buffer
        for step in range(rounds + 1):
            for name, (config, buffer) in buffers.items():
                batch = make_batch(config, step).groups[: config.fresh_per_step]
                groups = [_with_id(group, step * len(batch) + n) for n, group in enumerate(batch)]
                started = time.perf_counter()
                for group in groups:
                    await buffer.put(group.rollout, _verdict(group))
                await buffer.take(step, [group.group_id for group in groups], (), 0)
                if step:  # the first warms up
                    seconds[name].append(time.perf_counter() - started)
        for _, buffer in buffers.values():
            await buffer.flush()
    size = config.algorithm.prompts_per_step
    return [Row(name, tuple(values), PLAIN, size, "groups") for name, values in seconds.items()]


def _verdict(group: ScoredGroup) -> Verdict:
    return Verdict(group.rewards, group.format_rewards, group.answer_rewards, group.advantages)


def _with_id(group: ScoredGroup, group_id: int) -> ScoredGroup:
    item = PromptItem(group_id, "", group.rollout.item.prompt_token_ids, "")
    rollout = RolloutGroup(item, group.rollout.completions, group.rollout.generator)
    return replace(group, rollout=rollout)
