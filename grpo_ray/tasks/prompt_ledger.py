"""The account of a run's groups: which are in flight, buffered, waiting to be sampled again, or trained."""

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
    """An endless order of prompts (prompt_order.py), and the state of each group; a resumed run continues both.

        new -> in flight -> buffered -> trained, or dropped (it had no signal, and was replaced)
                |  ^   |       |
                v  |   |       v
               waiting |    waiting      (refused as too old, cut off, or the buffer died)
                       v
                   set aside             (every attempt to finish it failed)

    Waiting groups are taken again, so no prompt of an epoch is skipped. A group must be in flight to become
    buffered, and buffered to become trained, so none is trained twice.
    """

    def __init__(self, examples: Sequence[Example], prompters: Prompters, order: EpochOrder) -> None:
        assert len(examples) == order.num_examples
        self._examples, self._prompters, self._order = examples, prompters, order
        self._examples_sha256 = examples_digest(examples)
        self._next_group_id = 0
        self._in_flight: set[int] = set()
        self._scored: set[int] = set()  # in flight still, on their way into the buffer
        self._buffered: set[int] = set()
        self._waiting: set[int] = set()
        self._set_aside: set[int] = set()
        self._num_trained = 0
        self._num_dropped = 0
        self._num_cuts: Counter[int] = Counter()  # of unfinished groups; for metrics, so not in the state

    @property
    def next_group_id(self) -> int:
        """The first group that was never taken."""
        return self._next_group_id

    @property
    def num_trained(self) -> int:
        """Number of groups trained since the run began."""
        return self._num_trained

    @property
    def num_left(self) -> int:
        """Number of groups that will not be trained: other groups got their slots in the batches."""
        return self._num_dropped + len(self._set_aside)

    @property
    def unfinished(self) -> frozenset[int]:
        """Groups that were taken and are not yet trained, dropped or set aside."""
        return frozenset(self._in_flight | self._buffered | self._waiting)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def is_all_scored(self) -> bool:
        """True if every group in flight is sampled and scored."""
        return len(self._scored) == len(self._in_flight)

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
        """Take the next prompts of the order; they are now in flight."""
        assert num_prompts >= 0
        group_ids = range(self._next_group_id, self._next_group_id + num_prompts)
        items = [self._item(group_id) for group_id in group_ids]
        self._next_group_id += num_prompts
        self._in_flight.update(group_ids)
        return items

    def take_waiting(self) -> list[PromptItem]:
        """Take all waiting prompts, lowest group first; they are now in flight again."""
        group_ids = sorted(self._waiting)
        self._waiting.clear()
        self._in_flight.update(group_ids)
        return [self._item(group_id) for group_id in group_ids]

    def give_back(self, group_ids: Iterable[int]) -> None:
        """Let groups that were lost or refused wait to be taken again."""
        self._waiting |= self._leave((self._in_flight, self._buffered), group_ids, "in flight or buffered")

    def cut(self, group_ids: Collection[int]) -> None:
        """Give back groups that were too slow for the batch, and count the cut in their next `PromptItem`."""
        self.give_back(group_ids)
        self._num_cuts.update(group_ids)

    def mark_scored(self, group_id: int) -> None:
        """Record that the group is sampled and scored; it is still in flight until the buffer has it."""
        assert group_id in self._in_flight
        self._scored.add(group_id)

    def mark_buffered(self, group_id: int) -> None:
        """Move a group from in flight to buffered."""
        self._buffered |= self._leave((self._in_flight,), [group_id], "in flight")

    def observe(self, outcomes: Mapping[int, GroupOutcome]) -> None:
        """Take note of the outcomes of buffered groups, before they are marked as trained or dropped."""
        self._order.observe(outcomes)

    def mark_trained(self, group_ids: Iterable[int]) -> None:
        """Move groups from buffered to trained."""
        trained = self._leave((self._buffered,), group_ids, "buffered")
        self._forget(trained)
        self._num_trained += len(trained)

    def mark_dropped(self, group_ids: Iterable[int]) -> None:
        """Drop buffered groups that no batch will contain, because nothing can be learned from them."""
        dropped = self._leave((self._buffered,), group_ids, "buffered")
        self._forget(dropped)
        self._num_dropped += len(dropped)

    def mark_set_aside(self, group_id: int) -> None:
        """Give up a group that could not be finished; another one gets its slot."""
        self._set_aside |= self._leave((self._in_flight,), [group_id], "in flight")
        self._forget([group_id])

    def metrics(self) -> dict[str, float]:
        """Return the step metrics of the prompt order."""
        return self._order.metrics()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain JSON values, which `load_state_dict` restores."""
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
        """Restore the state; groups that were in flight, or are not in `buffered` now, wait to be taken again.

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
        self._order.load_state_dict(state["order"])
        unfinished = {*state["waiting"], *state["in_flight"], *state["buffered"]}
        self._next_group_id = state["next_group_id"]
        self._buffered = unfinished & set(buffered)
        self._waiting = unfinished - self._buffered
        self._in_flight, self._scored = set(), set()
        self._set_aside = set(state["set_aside"])
        self._num_trained = state["num_trained"]
        self._num_dropped = state["num_dropped"]
        self._num_cuts.clear()

    def _leave(self, states: Sequence[set[int]], group_ids: Iterable[int], name: str) -> set[int]:
        """Take the groups out of their states; refuse any that is in none of `states`, or is listed twice."""
        leaving = list(group_ids)
        times = Counter(leaving)
        wrong = sorted(g for g in times if times[g] > 1 or not any(g in state for state in states))
        if wrong:
            raise ValueError(
                f"groups {wrong} are not {name} (or listed twice): "
                "each taken group is trained, dropped, given back or set aside exactly once"
            )
        self._in_flight.difference_update(leaving)
        self._scored.difference_update(leaving)
        self._buffered.difference_update(leaving)
        return set(leaving)

    def _forget(self, group_ids: Iterable[int]) -> None:
        """Drop all that is remembered of unfinished groups."""
        for group_id in group_ids:
            self._order.forget([group_id])
            self._num_cuts.pop(group_id, None)

    def _item(self, group_id: int) -> PromptItem:
        example = self._examples[self._order.index(group_id)]
        item = self._prompters[example.task].item(group_id, example)
        return replace(item, num_cuts=self._num_cuts[group_id]) if group_id in self._num_cuts else item


def examples_digest(examples: Sequence[Example]) -> str:
    """Hash the examples in order, because a changed file would change which prompts are left."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(repr((example.question, example.ground_truth)).encode())
    return digest.hexdigest()[:16]
