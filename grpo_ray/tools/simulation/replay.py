"""A recorded run's requests, given again to simulated engines at the times at which they came."""

import asyncio
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from grpo_ray.tools.simulation.engine import SimulatedEngine
from grpo_ray.tools.simulation.records import RecordedRun
from grpo_ray.tools.simulation.speeds import Speeds
from grpo_ray.tools.simulation.virtual_time import VirtualClock
from grpo_ray.types import SamplingSettings

NO_LIMIT = 2**31 - 1


@dataclass(frozen=True)
class Burst:
    """The groups of one step that one engine sampled, in seconds since the epoch."""

    step: int
    group_ids: Sequence[int]
    arrivals: Sequence[float]
    end: float
    """The time at which its last group ended."""


def bursts_of(run: RecordedRun) -> list[list[Burst]]:
    """Return the bursts of each Generator, in the order of steps."""
    bursts: dict[str, list[Burst]] = defaultdict(list)
    for step in sorted(run.groups):
        of_generator = defaultdict(list)
        for rollout in run.groups[step]:
            of_generator[rollout.generator].append(rollout)
        for name, rollouts in of_generator.items():
            ids, arrivals = [r.group_id for r in rollouts], [r.begin for r in rollouts]
            bursts[name].append(Burst(step, ids, arrivals, max(r.end for r in rollouts)))
    return list(bursts.values())


def replayed_ends(run: RecordedRun, bursts: Sequence[Burst], speeds: Speeds) -> np.ndarray:
    """Return the end of each burst on a simulated engine, float64 `[bursts]`, in seconds since the epoch.

    A fresh engine samples each series of bursts that follow one another without a gap.
    """
    return np.concatenate([_ends(run, series, speeds) for series in _series(bursts)])


def _series(bursts: Sequence[Burst]) -> list[list[Burst]]:
    """Split at each gap in which the engine had nothing to sample."""
    series: list[list[Burst]] = []
    end = -math.inf
    for burst in bursts:
        if min(burst.arrivals) >= end:
            series.append([])
        series[-1].append(burst)
        end = max(end, burst.end)
    return series


def _ends(run: RecordedRun, bursts: Sequence[Burst], speeds: Speeds) -> np.ndarray:
    first = min(arrival for burst in bursts for arrival in burst.arrivals)
    lengths = _NextLengths(run.lengths)
    engine = SimulatedEngine(speeds, lengths, run.config.generator.max_num_seqs, seed=0)

    async def sample(group_id: int, arrival: float) -> float:
        await asyncio.sleep(arrival - first)
        lengths.group_id = group_id
        prompt, num_samples = (0,) * run.prompts[group_id], len(run.lengths[group_id])
        await engine.generate(prompt, SamplingSettings(num_samples, 1.0, 1.0, 1, NO_LIMIT))
        return asyncio.get_running_loop().time() + first

    async def whole(burst: Burst) -> float:
        return max(await asyncio.gather(*map(sample, burst.group_ids, burst.arrivals)))

    async def main() -> list[float]:
        return list(await asyncio.gather(*map(whole, bursts)))

    return np.array(VirtualClock().run(main()))


class _NextLengths:
    """The lengths of the group that is sampled next."""

    def __init__(self, lengths: Mapping[int, np.ndarray]) -> None:
        self._lengths, self.group_id = lengths, 0

    def draw(self, rng: np.random.Generator, num_samples: int) -> np.ndarray:
        return self._lengths[self.group_id]
