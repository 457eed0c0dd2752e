"""The endless stream of prompts: one per group, in an order that a resumed run continues."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from grpo_ray.tasks.examples import Example
from grpo_ray.tasks.prompt_order import EpochOrder
from grpo_ray.tasks.prompts import Prompters
from grpo_ray.types import PromptItem


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
