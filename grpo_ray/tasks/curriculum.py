"""A curriculum from observed outcomes: prompts without signal are sampled less often."""

import random
from collections.abc import Iterable, Mapping
from typing import Any

from grpo_ray.config.task import CurriculumConfig
from grpo_ray.tasks.prompt_order import EpochOrder


class CurriculumOrder(EpochOrder):
    """The epoch order, from which prompts that currently teach nothing are left out most of the time.

    A group without advantages, such as one in which all responses earn the same reward (with rewards 0 and 1:
    all right or all wrong), settles its prompt: an epoch then includes it with probability `min_weight`, drawn
    from the seed. Every epoch includes all other prompts, and those never seen. A settled prompt still occurs
    once in `1 / min_weight` epochs on average, and its new group decides how often it occurs after that.

    A group's example depends on the outcomes known when the group was first asked for, and is remembered until
    the group is done.
    """

    def __init__(self, num_examples: int, seed: int, config: CurriculumConfig) -> None:
        super().__init__(num_examples, seed)
        self._min_weight = config.min_weight
        self._next_place = 0  # in the epoch order
        self._num_drawn = 0
        self._drawn: dict[int, int] = {}  # example of each group that is not done
        self._seen: set[int] = set()  # examples
        self._settled: set[int] = set()  # those that had no signal when last seen

    def index(self, group_id: int) -> int:
        if group_id not in self._drawn:
            assert group_id == self._num_drawn, "groups are asked for in order, and not after they are done"
            self._drawn[group_id] = self._draw()
            self._num_drawn += 1
        return self._drawn[group_id]

    def _draw(self) -> int:
        while True:
            place, self._next_place = self._next_place, self._next_place + 1
            example = super().index(place)
            if random.Random(f"{self.seed}/curriculum/{place}").random() < self.weight(example):
                return example

    def weight(self, example: int) -> float:
        """Return the current probability that an epoch includes the example."""
        return self._min_weight if example in self._settled else 1.0

    def observe(self, outcomes: Mapping[int, bool]) -> None:
        for group_id, has_signal in sorted(outcomes.items()):  # of two groups of one prompt the later counts
            example = self._drawn[group_id]
            self._seen.add(example)
            (self._settled.discard if has_signal else self._settled.add)(example)

    def forget(self, group_ids: Iterable[int]) -> None:
        for group_id in group_ids:
            del self._drawn[group_id]

    def state_dict(self) -> dict[str, Any]:
        return {
            "next_place": self._next_place,
            "num_drawn": self._num_drawn,
            "drawn": sorted(self._drawn.items()),
            "seen": sorted(self._seen),
            "settled": sorted(self._settled),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not state:
            raise ValueError("the checkpoint was written without task.curriculum; resume without it")
        self._next_place, self._num_drawn = state["next_place"], state["num_drawn"]
        self._drawn = dict(state["drawn"])
        self._seen = set(state["seen"] if "seen" in state else dict(state["pass_rates"]))
        self._settled = set(state["settled"])

    def metrics(self) -> dict[str, float]:
        """Return the shares of the prompts that were seen and settled, and how many were skipped so far."""
        return {
            "curriculum/seen_frac": len(self._seen) / self.num_examples,
            "curriculum/settled_frac": len(self._settled) / self.num_examples,
            "curriculum/skipped": float(self._next_place - self._num_drawn),
        }
