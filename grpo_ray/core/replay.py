"""ReplayMemory: groups that were trained on and may be used again, within limits of age and uses."""

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from grpo_ray.config.schedule import ReplayConfig
from grpo_ray.core.staleness import oldest_allowed
from grpo_ray.types import NO_VERSION, ScoredGroup


@dataclass(frozen=True)
class ReplayedGroup:
    """A group that was trained on."""

    group: ScoredGroup
    num_uses: int  # batches that it has been in, including the first


class ReplayMemory:
    """Groups to draw from, bounded in number, bytes, age and uses.

    A draw depends on the contents, the seed and the version alone, so a resumed run repeats it; ids break ties.
    """

    def __init__(self, config: ReplayConfig, num_drawn: int, seed: int) -> None:
        """`num_drawn`: groups to draw per batch, if there are that many."""
        self._config, self._num_drawn, self._seed = config, num_drawn, seed
        self._groups: dict[int, ReplayedGroup] = {}  # in the order of their first use
        self._num_bytes = 0
        self._drawn_version = -1
        self._before: tuple[ReplayedGroup, ...] = ()  # the contents before that draw
        self._evicted = dict.fromkeys(("age", "uses", "room"), 0)

    def __len__(self) -> int:
        return len(self._groups)

    def contents(self, version: int) -> tuple[ReplayedGroup, ...]:
        """Return the contents after the batches that made the Learner's `version`."""
        return tuple(self._groups.values()) if self._drawn_version < version else self._before

    def restore(self, contents: Iterable[ReplayedGroup]) -> None:
        for replayed in contents:
            self._add(replayed)

    def add(self, groups: Iterable[ScoredGroup]) -> None:
        """Add groups that have been trained on once; evict the oldest to make room."""
        for group in groups if self._num_drawn else ():
            if group.rollout.oldest_version != NO_VERSION:  # else it would rank as the newest, and never age
                self._add(ReplayedGroup(group, 1))
        max_bytes = self._config.max_gib * 2**30
        while self._groups and (len(self) > self._config.max_groups or self._num_bytes > max_bytes):
            self._evict(next(iter(self._groups)), "room")

    def draw(self, version: int) -> tuple[ReplayedGroup, ...]:
        """Return the groups that the Learner at `version` trains on again, by id, with this use counted.

        Skips groups with a token older than `max_age` versions, and groups that were used `max_uses` times.
        """
        self._drawn_version, self._before = version, tuple(self._groups.values())
        for group_id, replayed in list(self._groups.items()):
            if replayed.group.rollout.oldest_version < oldest_allowed(version, self._config.max_age):
                self._evict(group_id, "age")
        chosen = self._choose(version)
        drawn = []
        for group_id in chosen:
            replayed = replace(self._groups[group_id], num_uses=self._groups[group_id].num_uses + 1)
            self._groups[group_id] = replayed
            drawn.append(replayed)
            if replayed.num_uses >= self._config.max_uses:
                self._evict(group_id, "uses")
        return tuple(drawn)

    def take_metrics(self) -> dict[str, float]:
        """Return the size, and the evictions since the last call; empty if the run replays nothing."""
        if not self._num_drawn:
            return {}
        evicted = {f"replay/evicted_{cause}": float(n) for cause, n in self._evicted.items()}
        self._evicted = dict.fromkeys(self._evicted, 0)
        return {"replay/groups": float(len(self)), "replay/bytes": float(self._num_bytes), **evicted}

    def _choose(self, version: int) -> list[int]:
        rank = _rank(self._config.sampling, random.Random(f"{self._seed}/replay/{version}"))
        ranked = sorted((rank(g.group), group_id) for group_id, g in sorted(self._groups.items()))
        return sorted(group_id for _, group_id in ranked[: self._num_drawn])

    def _add(self, replayed: ReplayedGroup) -> None:
        self.forget([replayed.group.group_id])
        self._groups[replayed.group.group_id] = replayed
        self._num_bytes += replayed.group.num_bytes

    def forget(self, group_ids: Iterable[int]) -> None:
        """Remove groups that were not trained on after all."""
        for group_id in set(group_ids) & self._groups.keys():
            self._remove(group_id)

    def _evict(self, group_id: int, cause: str) -> None:
        self._remove(group_id)
        self._evicted[cause] += 1

    def _remove(self, group_id: int) -> None:
        self._num_bytes -= self._groups.pop(group_id).group.num_bytes


def _rank(sampling: str, rng: random.Random) -> Callable[[ScoredGroup], float]:
    """Return the sort key of groups; those with the smallest keys are drawn.

    To draw without replacement in proportion to a weight w, take the smallest of -log(u) / w with u uniform
    (Efraimidis and Spirakis 2006, A-Res); a group with w = 0 comes last.
    """
    if sampling == "recent":
        return lambda group: -group.rollout.oldest_version
    if sampling == "uniform":
        return lambda group: rng.random()

    def by_advantage(group: ScoredGroup) -> float:
        values = np.concatenate(group.turn_advantages or [group.advantages])
        weight = float(np.abs(values).mean()) if values.size else 0.0
        draw = -math.log(1.0 - rng.random())
        return draw / weight if weight > 0 else math.inf

    return by_advantage
