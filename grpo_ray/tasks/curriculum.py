"""A curriculum from observed outcomes: prompts without signal are sampled less often."""

import random
from collections.abc import Iterable, Mapping
from typing import Any

from grpo_ray.config.task import CurriculumConfig
from grpo_ray.tasks.prompt_order import EpochOrder
from grpo_ray.types import GroupOutcome


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
        self._pass_rates: dict[int, float] = {}  # of each example, when last seen
        self._settled: set[int] = set()  # examples that had no signal then

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

    def observe(self, outcomes: Mapping[int, GroupOutcome]) -> None:
        for group_id, outcome in sorted(outcomes.items()):  # of two groups of one prompt, the later one counts
            example = self._drawn[group_id]
            self._pass_rates[example] = outcome.pass_rate
            (self._settled.discard if outcome.has_signal else self._settled.add)(example)

    def forget(self, group_ids: Iterable[int]) -> None:
        for group_id in group_ids:
            del self._drawn[group_id]

    def state_dict(self) -> dict[str, Any]:
        return {
            "next_place": self._next_place,
            "num_drawn": self._num_drawn,
            "drawn": sorted(self._drawn.items()),
            "pass_rates": sorted(self._pass_rates.items()),
            "settled": sorted(self._settled),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not state:
            raise ValueError("the checkpoint was written without task.curriculum; resume without it")
        self._next_place, self._num_drawn = state["next_place"], state["num_drawn"]
        self._drawn = dict(state["drawn"])
        self._pass_rates = dict(state["pass_rates"])
        self._settled = set(state["settled"])

    def metrics(self) -> dict[str, float]:
        """Return how hard the prompts were when last seen, and how many were skipped since the run began."""
        settled_frac = len(self._settled) / self.num_examples
        metrics = {
            "curriculum/seen_frac": len(self._pass_rates) / self.num_examples,
            "curriculum/settled_frac": settled_frac,
            "curriculum/weight/mean": 1.0 - settled_frac * (1.0 - self._min_weight),
            "curriculum/weight/min": self._min_weight if self._settled else 1.0,
            "curriculum/skipped": float(self._next_place - self._num_drawn),
        }
        if self._pass_rates:
            metrics["curriculum/pass_rate/mean"] = sum(self._pass_rates.values()) / len(self._pass_rates)
        return metrics
