"""The endless order in which training examples are asked, drawn from the seed, and from outcomes so far.

`PromptStream` makes the prompts in it: one per group, which a resumed run continues.
"""

import hashlib
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from grpo_ray.config.task import CurriculumConfig
from grpo_ray.tasks.examples import Example
from grpo_ray.tasks.prompts import Prompters
from grpo_ray.types import PromptItem


class EpochOrder:
    """Epochs that are each a permutation: group g asks example `permutation(epoch g // n)[g % n]`.

    Outcomes of groups do not change this order, so it has no state; subclasses may have some.
    """

    def __init__(self, num_examples: int, seed: int) -> None:
        if not num_examples:
            raise ValueError("the task has no training examples; give at least one")
        self.num_examples, self.seed = num_examples, seed
        self._permutations: dict[int, list[int]] = {}

    def index(self, group_id: int) -> int:
        """Return the group's example; it stays the same until the group is done."""
        epoch, place = divmod(group_id, self.num_examples)
        return self._permutation(epoch)[place]

    def observe(self, outcomes: Mapping[int, bool]) -> None:
        """Take note of sampled groups: True for those that had a signal."""

    def forget(self, group_ids: Iterable[int]) -> None:
        """Drop the state kept for groups that are done."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the order depends on except the seed, as plain JSON values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the order.

        Raises:
            ValueError: the state belongs to another kind of order.
        """

    def metrics(self) -> dict[str, float]:
        """Return the step metrics of the order, if it has any."""
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
    """A mixture that draws each group from one part, in proportion to the weights; each part has its own order.

    Examples are numbered consecutively, part after part. A group's part depends on the seed alone; it is
    remembered until the group is done, and groups are not asked for after that.
    """

    def __init__(self, parts: Mapping[str, tuple[EpochOrder, float]], seed: int) -> None:
        """
        Args:
            parts: order and weight, by name.
        """
        self.names = tuple(parts)
        self._orders = [order for order, _ in parts.values()]
        sizes = [order.num_examples for order in self._orders]
        super().__init__(sum(sizes), seed)
        self._offsets = [0, *accumulate(sizes)]
        self._weights = list(accumulate(weight for _, weight in parts.values()))
        self._begin()

    def _begin(self) -> None:
        self._rng = random.Random(f"{self.seed}/mixture")
        self._counts = [0] * len(self._orders)  # groups drawn from each part
        self._drawn: dict[int, tuple[int, int]] = {}  # part and place of groups not done

    def locate(self, group_id: int) -> tuple[int, int]:
        """Return the group's part, and its place in the part's own order."""
        while (drawn := sum(self._counts)) <= group_id:
            part = self._rng.choices(range(len(self._weights)), cum_weights=self._weights)[0]
            self._drawn[drawn] = part, self._counts[part]
            self._counts[part] += 1
        return self._drawn[group_id]

    def index(self, group_id: int) -> int:
        part, place = self.locate(group_id)
        return self._offsets[part] + self._orders[part].index(place)

    def observe(self, outcomes: Mapping[int, bool]) -> None:
        by_part: dict[int, dict[int, bool]] = defaultdict(dict)
        for group_id, outcome in outcomes.items():
            part, place = self.locate(group_id)
            by_part[part][place] = outcome
        for part, part_outcomes in by_part.items():
            self._orders[part].observe(part_outcomes)

    def forget(self, group_ids: Iterable[int]) -> None:
        for group_id in group_ids:
            part, place = self.locate(group_id)
            self._orders[part].forget([place])
            del self._drawn[group_id]

    def state_dict(self) -> dict[str, Any]:
        """Return the parts' states, the draws so far, and the weights: other weights make another order."""
        return {
            "names": list(self.names),
            "weights": list(self._weights),
            "parts": [order.state_dict() for order in self._orders],
            "num_drawn": sum(self._counts),
            "counts": list(self._counts),
            "drawn": [[group_id, *place] for group_id, place in sorted(self._drawn.items())],
            "random": list(self._rng.getstate()[1]),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        own = self.state_dict()
        for key in ("names", "weights"):
            if state.get(key) != own[key]:
                raise ValueError(
                    f"the checkpoint's mixture has the {key} {state.get(key)} (weights are cumulative), this "
                    f"run has {own[key]}; resume with the task.parts that the checkpoint was written with"
                )
        for order, part in zip(self._orders, state["parts"], strict=True):
            order.load_state_dict(part)
        self._begin()
        if "random" not in state:  # by an earlier version: every group is drawn again, from the first
            return
        version, _, gauss_next = self._rng.getstate()
        self._rng.setstate((version, tuple(state["random"]), gauss_next))
        self._counts = list(state["counts"])
        self._drawn = {group_id: (part, place) for group_id, part, place in state["drawn"]}

    def metrics(self) -> dict[str, float]:
        """Return each part's metrics under its name."""
        return {
            f"{metric}/{name}": value
            for name, order in zip(self.names, self._orders, strict=True)
            for metric, value in order.metrics().items()
        }


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


class PromptStream:
    """The prompt of every group, by its id; ids count from 0 over the whole run."""

    def __init__(self, examples: Sequence[Example], prompters: Prompters, order: EpochOrder) -> None:
        assert len(examples) == order.num_examples
        self._examples, self._prompters, self.order = examples, prompters, order
        self._identity = {
            "seed": order.seed,
            "num_examples": len(examples),
            "examples_sha256": examples_digest(examples),
        }
        self._beginning = self.state_dict()

    def item(self, group_id: int, num_cuts: int = 0) -> PromptItem:
        """Return the group's prompt, which stays the same until the group is done.

        Args:
            num_cuts: times that oversampling has cut the group off so far.
        """
        example = self._examples[self.order.index(group_id)]
        item = self._prompters[example.task].item(group_id, example)
        return replace(item, num_cuts=num_cuts) if num_cuts else item

    def task(self, group_id: int) -> str:
        """Return the part of a mixture that the group's prompt belongs to."""
        return self._examples[self.order.index(group_id)].task

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain JSON values, which `load_state_dict` restores."""
        return {**self._identity, "order": self.order.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore the order; None is the state in which the stream was made.

        Raises:
            ValueError: the state belongs to another task or seed.
        """
        state = self._beginning if state is None else state
        for key, own in self._identity.items():
            if state[key] != own:
                raise ValueError(
                    f"the checkpoint's prompt order has {key} {state[key]}, this run has {own}; "
                    "resume with the task's files and the seed that the checkpoint was written with"
                )
        self.order.load_state_dict(state["order"])


def examples_digest(examples: Sequence[Example]) -> str:
    """Hash the examples in order, because a changed file would change which prompts are left."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(repr((example.question, example.ground_truth)).encode())
    return digest.hexdigest()[:16]
