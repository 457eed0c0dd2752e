"""What a Generator asks of an inference engine. Two engines answer: vLLM and the torch reference."""

from typing import Protocol

from grpo_ray.types import Completion, SamplingSettings, WeightSnapshot


class EngineDied(RuntimeError):
    """The engine cannot serve any more; its Generator has to be replaced."""


class Engine(Protocol):
    """Samples groups, and takes new weights in one transaction.

    A weight update is `pause -> start_weight_update -> update_weights -> finish_weight_update(version) ->
    reset_prefix_cache -> resume`. Requests in flight are kept, and go on under the new weights: each token
    carries the version that sampled it.
    """

    async def start(self, version: int) -> None:
        """Serve the weights that were loaded, as `version`."""

    async def generate(
        self, prompt_token_ids: tuple[int, ...], settings: SamplingSettings
    ) -> tuple[Completion, ...]:
        """Sample `settings.num_samples` completions of one prompt; returns when all are finished.

        Raises:
            EngineDied: this and every later request fails.
        """

    async def pause(self) -> None:
        """Stop sampling after the current token; returns when nothing runs."""

    async def start_weight_update(self) -> None:
        """Make ready to receive weights."""

    async def update_weights(self, snapshot: WeightSnapshot) -> None:
        """Load the tensors; an error if they are not exactly the model's. The version does not change yet."""

    async def finish_weight_update(self, version: int) -> None:
        """Commit: tokens sampled from here on carry `version`."""

    async def reset_prefix_cache(self) -> None:
        """Forget key-value pairs that the old weights computed."""

    async def resume(self) -> None:
        """Sample again."""

    async def sleep(self) -> None:
        """Colocated: give the device's memory to the Learner. Nothing may be running."""

    async def wake(self) -> None:
        """Take it back; what weights are there is not known until they are updated."""

    async def shutdown(self) -> None:
        """End every process and free every device the engine holds."""
