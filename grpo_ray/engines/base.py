"""The protocol that every inference engine implements."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from grpo_ray.transfer.messages import Meeting, WeightSnapshot
from grpo_ray.types import Completion, SamplingSettings

if TYPE_CHECKING:  # it loads torch
    from grpo_ray.learning.sequences import TrainSequence


class EngineDied(RuntimeError):
    """The death of an engine, after which its Generator must be replaced."""


class Engine(Protocol):
    """An engine that samples groups, and loads new weights in one transaction.

    A weight update is `stage(snapshot) -> pause -> load -> finish(version) -> resume`. Requests in flight are
    kept and continue under the new weights; each token carries the version that sampled it.
    """

    async def start(self, version: int) -> None:
        """Serve the weights that were loaded at construction, as `version`."""

    async def generate(
        self, prompt_token_ids: tuple[int, ...], settings: SamplingSettings
    ) -> tuple[Completion, ...]:
        """Sample `settings.num_samples` completions of one prompt; return when all are finished.

        Raises:
            EngineDied: this and every later request fails.
        """

    async def ping(self) -> None:
        """Return once the engine has answered, which one that samples does between two tokens."""

    async def stage(self, snapshot: WeightSnapshot) -> None:
        """Bring the weights as near to the device as possible, while sampling continues with the old ones.

        Raises:
            ValueError: they are not exactly the model's; `load` raises it if that is found only there.
        """

    async def pause(self) -> None:
        """Stop sampling after the current token; return once nothing is being sampled."""

    async def load(self) -> None:
        """Replace all weights by the staged ones. The version stays the same."""

    async def finish(self, version: int) -> None:
        """Commit the update: tokens sampled from now on carry `version`.

        Discards keys and values of the old weights, unless `weight_sync.recompute_kv` is false.
        """

    async def resume(self) -> None:
        """Continue sampling."""

    async def sleep(self) -> None:
        """Free the device's memory for the colocated Learner. No request may be running."""

    async def wake(self) -> None:
        """Take the memory back; the weights are undefined until they are updated."""

    async def shutdown(self) -> None:
        """End every process of the engine, and free its devices."""


@runtime_checkable
class ReceivingEngine(Protocol):
    """An engine with processes that receive weights on their own devices, while it loads them."""

    async def join(self, meeting: Meeting) -> None:
        """Join the wire with each of them; raises WireError if the Learner did not come."""


class TeacherEngine(Protocol):
    """An engine that judges given tokens, with weights that never change."""

    async def logprobs(self, sequences: "Sequence[TrainSequence]") -> list[np.ndarray]:
        """Return the model's logprobs of each sequence's sampled tokens, `[sampled_tokens]` float32.

        They are of the distribution that the sampler draws from: at its temperature, without what it rules out.

        Raises:
            EngineDied: this and every later request fails.
        """

    async def shutdown(self) -> None:
        """End every process of the engine, and free its devices."""
