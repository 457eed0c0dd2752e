"""The order of a run's prompts, and the account of which are in flight, waiting or trained."""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from grpo_ray.tasks.examples import Example
from grpo_ray.tasks.prompt_order import EpochOrder
from grpo_ray.tasks.prompts import Prompters
from grpo_ray.types import GroupOutcome, PromptItem


class PromptLedger:
    """An endless order of prompts (prompt_order.py), the same one in a resumed run. Each group goes

        new -> in flight -> buffered -> trained, or dropped (it had no signal, and was replaced)
                |  ^   |       |
                v  |   |       v
               waiting |    waiting      (refused as too old, cut off, or the buffer died)
                       v
                   set aside             (it never finished, however often it was tried)

    Waiting groups are taken again, so no prompt of an epoch is skipped, and a group that is not in flight
    cannot be buffered, nor one that is not buffered trained, so none is trained twice.
    """

    def __init__(self, examples: Sequence[Example], prompters: Prompters, order: EpochOrder) -> None:
        assert len(examples) == order.num_examples
        self._examples, self._prompters, self._order = examples, prompters, order
        self._examples_sha256 = _digest(examples)
        self._next_group_id = 0
        self._in_flight: set[int] = set()
        self._scored: set[int] = set()  # in flight still, on their way into the buffer
        self._buffered: set[int] = set()
        self._waiting: set[int] = set()
        self._set_aside: set[int] = set()
        self._num_trained = 0
        self._num_dropped = 0
        self._num_cuts: Counter[int] = Counter()  # for the metrics: not in the state

    @property
    def next_group_id(self) -> int:
        """The first group that was never taken."""
        return self._next_group_id

    @property
    def num_trained(self) -> int:
        return self._num_trained

    @property
    def num_left(self) -> int:
        """Groups that will not be trained: their places in the batches went to others."""
        return self._num_dropped + len(self._set_aside)

    @property
    def unfinished(self) -> frozenset[int]:
        """Groups that were taken, and are still to be trained."""
        return frozenset(self._in_flight | self._buffered | self._waiting)

    @property
    def in_flight(self) -> frozenset[int]:
        return frozenset(self._in_flight)

    @property
    def scored(self) -> frozenset[int]:
        """Groups in flight that are sampled and scored, on their way into the buffer."""
        return frozenset(self._scored)

    @property
    def buffered(self) -> frozenset[int]:
        return frozenset(self._buffered)

    @property
    def waiting(self) -> frozenset[int]:
        return frozenset(self._waiting)

    @property
    def set_aside(self) -> frozenset[int]:
        return frozenset(self._set_aside)

    def take_new(self, num_prompts: int) -> list[PromptItem]:
        """The next prompts that were never taken, now in flight."""
        assert num_prompts >= 0
        group_ids = range(self._next_group_id, self._next_group_id + num_prompts)
        items = [self._item(group_id) for group_id in group_ids]
        self._next_group_id += num_prompts
        self._in_flight.update(group_ids)
        return items

    def take_waiting(self) -> list[PromptItem]:
        """All prompts that were given back, lowest group first, now in flight again."""
        group_ids = sorted(self._waiting)
        self._waiting.clear()
        self._in_flight.update(group_ids)
        return [self._item(group_id) for group_id in group_ids]

    def give_back(self, group_ids: Iterable[int]) -> None:
        """These groups were lost or refused; they will be taken again."""
        self._waiting |= self._leave(self._in_flight | self._buffered, group_ids, "in flight or buffered")

    def cut(self, group_ids: Collection[int]) -> None:
        """These groups were too slow for the batch; they will be taken again, and it will be known of them."""
        self.give_back(group_ids)
        self._num_cuts.update(group_ids)

    def mark_scored(self, group_id: int) -> None:
        """Record that the group is sampled and scored; it is still in flight until the buffer has it."""
        assert group_id in self._in_flight
        self._scored.add(group_id)

    def mark_buffered(self, group_id: int) -> None:
        self._buffered |= self._leave(self._in_flight, [group_id], "in flight")

    def observe(self, outcomes: Mapping[int, GroupOutcome]) -> None:
        """Of groups that came, and are not marked as trained or dropped yet: how they came out."""
        self._order.observe(outcomes)

    def mark_trained(self, group_ids: Iterable[int]) -> None:
        trained = self._leave(self._buffered, group_ids, "buffered")
        self._order.forget(trained)
        self._num_trained += len(trained)
        self._num_cuts = Counter({group: n for group, n in self._num_cuts.items() if group not in trained})

    def mark_dropped(self, group_ids: Iterable[int]) -> None:
        """They came, and were left out of the batches: nothing can be learned from them."""
        dropped = self._leave(self._buffered, group_ids, "buffered")
        self._order.forget(dropped)
        self._num_dropped += len(dropped)

    def mark_set_aside(self, group_id: int) -> None:
        """The group could not be finished: another takes its place."""
        self._set_aside |= self._leave(self._in_flight, [group_id], "in flight")
        self._order.forget([group_id])

    def metrics(self) -> dict[str, float]:
        """What the order has to say of itself."""
        return self._order.metrics()

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values, from which the same ledger resumes."""
        return {
            "seed": self._order.seed,
            "num_examples": len(self._examples),
            "examples_sha256": self._examples_sha256,
            "next_group_id": self._next_group_id,
            "in_flight": sorted(self._in_flight),
            "buffered": sorted(self._buffered),
            "waiting": sorted(self._waiting),
            "set_aside": sorted(self._set_aside),
            "num_trained": self._num_trained,
            "num_dropped": self._num_dropped,
            "order": self._order.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], buffered: Iterable[int]) -> None:
        """Resume; whatever was in flight, or buffered but is not in `buffered`, waits to be taken again.

        Raises:
            ValueError: the state belongs to another task or seed.
        """
        own = self.state_dict()
        for key in ("seed", "num_examples", "examples_sha256"):
            if state[key] != own[key]:
                raise ValueError(
                    f"the checkpoint's prompt order has {key} {state[key]}, this run has {own[key]}; "
                    "resume with the task's files and the seed that the checkpoint was written with"
                )
        self._order.load_state_dict(state.get("order", {}))  # checkpoints of older versions have none
        unfinished = {*state["waiting"], *state["in_flight"], *state["buffered"]}
        self._next_group_id = state["next_group_id"]
        self._buffered = unfinished & set(buffered)
        self._waiting = unfinished - self._buffered
        self._in_flight, self._scored = set(), set()
        self._set_aside = set(state["set_aside"])
        self._num_trained = state["num_trained"]
        self._num_dropped = state.get("num_dropped", 0)  # checkpoints of older versions have none
        self._num_cuts.clear()

    def _leave(self, states: set[int], group_ids: Iterable[int], name: str) -> set[int]:
        leaving = list(group_ids)
        strangers = sorted({g for g in leaving if g not in states or leaving.count(g) > 1})
        if strangers:
            raise ValueError(
                f"groups {strangers} are not {name} (or named twice): "
                "each taken group is trained, given back or set aside exactly once"
            )
        self._in_flight.difference_update(leaving)
        self._scored.difference_update(leaving)
        self._buffered.difference_update(leaving)
        return set(leaving)

    def _item(self, group_id: int) -> PromptItem:
        example = self._examples[self._order.index(group_id)]
        item = self._prompters[example.task].item(group_id, example)
        return replace(item, num_cuts=self._num_cuts[group_id]) if group_id in self._num_cuts else item


def _digest(examples: Sequence[Example]) -> str:
    """Of the examples in their order: a file that was changed would change which prompts are left."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(repr((example.question, example.ground_truth)).encode())
    return digest.hexdigest()[:16]
