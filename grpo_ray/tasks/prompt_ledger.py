"""The order of a run's prompts, and the account of which are in flight, waiting or trained."""

import random
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from grpo_ray.tasks.examples import Example
from grpo_ray.tasks.prompts import render
from grpo_ray.types import PromptItem


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that prompts need."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> Any: ...


class PromptLedger:
    """An endless order of prompts: epoch after epoch, each a permutation drawn from the seed.

    Group g is example `permutation(epoch g // n)[g % n]`, whatever happened before, so a resumed run
    asks the same questions. Each group goes

        new -> in flight -> trained
                  |  ^
                  v  |
                waiting    (given back: refused as too old, or its generator died)

    and waiting groups are taken again before new ones, so no prompt of an epoch is skipped.
    """

    def __init__(self, examples: Sequence[Example], template: str, tokenizer: Tokenizer, seed: int) -> None:
        if not examples:
            raise ValueError("the task has no training examples; give at least one")
        self._examples = examples
        self._template = template
        self._tokenizer = tokenizer
        self._seed = seed
        self._permutations: dict[int, list[int]] = {}
        self._next_group_id = 0
        self._in_flight: set[int] = set()
        self._waiting: set[int] = set()
        self._num_trained = 0

    @property
    def next_group_id(self) -> int:
        """The first group that was never taken."""
        return self._next_group_id

    @property
    def num_trained(self) -> int:
        return self._num_trained

    @property
    def in_flight(self) -> frozenset[int]:
        return frozenset(self._in_flight)

    @property
    def waiting(self) -> frozenset[int]:
        return frozenset(self._waiting)

    def take(self, num_prompts: int) -> list[PromptItem]:
        """The next prompts, now in flight: waiting ones first, lowest group first, then new ones."""
        assert num_prompts >= 0
        group_ids = sorted(self._waiting)[:num_prompts]
        num_new = num_prompts - len(group_ids)
        group_ids += range(self._next_group_id, self._next_group_id + num_new)
        items = [self._item(group_id) for group_id in group_ids]
        self._next_group_id += num_new
        self._waiting.difference_update(group_ids)
        self._in_flight.update(group_ids)
        return items

    def give_back(self, group_ids: Iterable[int]) -> None:
        """These groups were not trained; they will be taken again."""
        leaving = self._leave_flight(group_ids)
        self._waiting |= leaving

    def mark_trained(self, group_ids: Iterable[int]) -> None:
        self._num_trained += len(self._leave_flight(group_ids))

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values, from which the same ledger resumes."""
        return {
            "seed": self._seed,
            "num_examples": len(self._examples),
            "next_group_id": self._next_group_id,
            "in_flight": sorted(self._in_flight),
            "waiting": sorted(self._waiting),
            "num_trained": self._num_trained,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume; what was in flight is lost with its run, and waits to be taken again."""
        for key, own in (("seed", self._seed), ("num_examples", len(self._examples))):
            if state[key] != own:
                raise ValueError(
                    f"the checkpoint's prompt order has {key} {state[key]}, this run has {own}; "
                    "resume with the task and seed that the checkpoint was written with"
                )
        self._next_group_id = state["next_group_id"]
        self._waiting = {*state["waiting"], *state["in_flight"]}
        self._in_flight = set()
        self._num_trained = state["num_trained"]

    def _leave_flight(self, group_ids: Iterable[int]) -> set[int]:
        leaving = list(group_ids)
        strangers = sorted({g for g in leaving if g not in self._in_flight or leaving.count(g) > 1})
        if strangers:
            raise ValueError(
                f"groups {strangers} are not in flight (or named twice): "
                "each taken group is trained or given back exactly once"
            )
        self._in_flight.difference_update(leaving)
        return set(leaving)

    def _item(self, group_id: int) -> PromptItem:
        epoch, place = divmod(group_id, len(self._examples))
        example = self._examples[self._permutation(epoch)[place]]
        return _make_item(group_id, example, self._template, self._tokenizer)

    def _permutation(self, epoch: int) -> list[int]:
        if epoch not in self._permutations:
            self._permutations = {e: p for e, p in self._permutations.items() if e == epoch - 1}
            order = list(range(len(self._examples)))
            # A text seed is hashed the same way in every process; hash() of a tuple need not be.
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
            self._permutations[epoch] = order
        return self._permutations[epoch]


def make_items(examples: Sequence[Example], template: str, tokenizer: Tokenizer) -> list[PromptItem]:
    """A validation set's prompts, in its own order: `group_id` is the example's index."""
    return [_make_item(index, example, template, tokenizer) for index, example in enumerate(examples)]


def _make_item(group_id: int, example: Example, template: str, tokenizer: Tokenizer) -> PromptItem:
    prompt = render(template, example.question)
    token_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    return PromptItem(group_id, prompt, tuple(token_ids), example.ground_truth)
