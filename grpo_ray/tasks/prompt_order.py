"""Which training example each group asks: an endless order, drawn from the seed."""

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

from grpo_ray.types import GroupOutcome


class EpochOrder:
    """Epoch after epoch, each a permutation: group g is example `permutation(epoch g // n)[g % n]`.

    What happens to the groups does not change this order, so it has nothing to remember; others do.
    """

    def __init__(self, num_examples: int, seed: int) -> None:
        if not num_examples:
            raise ValueError("the task has no training examples; give at least one")
        self.num_examples, self.seed = num_examples, seed
        self._permutations: dict[int, list[int]] = {}

    def index(self, group_id: int) -> int:
        """The example of the group; the same one whenever it is asked for, until the group is done."""
        epoch, place = divmod(group_id, self.num_examples)
        return self._permutation(epoch)[place]

    def observe(self, outcomes: Mapping[int, GroupOutcome]) -> None:
        """How groups that came have come out."""

    def forget(self, group_ids: Iterable[int]) -> None:
        """These groups are done: their examples are not asked for again."""

    def state_dict(self) -> dict[str, Any]:
        """What the order depends on beside the seed, in plain JSON values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        return {}

    def _permutation(self, epoch: int) -> list[int]:
        if epoch not in self._permutations:
            self._permutations = {e: p for e, p in self._permutations.items() if e == epoch - 1}
            order = list(range(self.num_examples))
            # A text seed is hashed the same way in every process; hash() of a tuple need not be.
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            self._permutations[epoch] = order
        return self._permutations[epoch]


class MixtureOrder(EpochOrder):
    """Each group is drawn from one of the parts, in proportion to their weights; each part keeps its own order.

    Examples are numbered through, part after part. Which part a group is of depends on the seed alone.
    """

    def __init__(self, parts: Mapping[str, tuple[EpochOrder, float]], seed: int) -> None:
        """`parts` are the orders and weights by name."""
        self.names = tuple(parts)
        self._orders = [order for order, _ in parts.values()]
        sizes = [order.num_examples for order in self._orders]
        super().__init__(sum(sizes), seed)
        self._offsets = [0, *accumulate(sizes)]
        self._weights = list(accumulate(weight for _, weight in parts.values()))
        self._rng = random.Random(f"{seed}/mixture")
        self._drawn: list[tuple[int, int]] = []  # of each group so far, its part and its place in the part
        self._counts = [0] * len(self._orders)

    def locate(self, group_id: int) -> tuple[int, int]:
        """The group's part, and its place in the part's own order."""
        while len(self._drawn) <= group_id:
            part = self._rng.choices(range(len(self._weights)), cum_weights=self._weights)[0]
            self._drawn.append((part, self._counts[part]))
            self._counts[part] += 1
        return self._drawn[group_id]

    def index(self, group_id: int) -> int:
        part, place = self.locate(group_id)
        return self._offsets[part] + self._orders[part].index(place)

    def observe(self, outcomes: Mapping[int, GroupOutcome]) -> None:
        by_part: dict[int, dict[int, GroupOutcome]] = defaultdict(dict)
        for group_id, outcome in outcomes.items():
            part, place = self.locate(group_id)
            by_part[part][place] = outcome
        for part, of_part in by_part.items():
            self._orders[part].observe(of_part)

    def forget(self, group_ids: Iterable[int]) -> None:
        for part, place in map(self.locate, group_ids):
            self._orders[part].forget([place])

    def state_dict(self) -> dict[str, Any]:
        """Of the parts that have any; with the weights, as another mixture is another order."""
        states = [order.state_dict() for order in self._orders]
        return {"names": list(self.names), "weights": self._weights, "parts": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        own = self.state_dict()
        for key in ("names", "weights"):
            if state.get(key) != own[key]:
                raise ValueError(
                    f"the checkpoint's mixture has the {key} {state.get(key)} (weights summed up), this run "
                    f"{own[key]}; resume with the task.parts that the checkpoint was written with"
                )
        for order, part in zip(self._orders, state["parts"], strict=True):
            order.load_state_dict(part)

    def metrics(self) -> dict[str, float]:
        """Each part's, under its name."""
        return {
            f"{metric}/{name}": value
            for name, order in zip(self.names, self._orders, strict=True)
            for metric, value in order.metrics().items()
        }
