"""A teacher in torch, in the Teacher's own process: the Learner's own way of computing logprobs."""

import asyncio
from collections.abc import Sequence

import numpy as np

from grpo_ray.config import Config
from grpo_ray.engines.torch_engine import load_served
from grpo_ray.learning.forward_backward import ForwardBackward
from grpo_ray.learning.sequences import TrainSequence


class TorchTeacher:
    """An engine that computes one group after another, each prompt once if the model allows it.

    Which groups come together changes no value, so a synchronous run is resumed exactly.
    """

    def __init__(self, config: Config, end_token_ids: tuple[int, ...]) -> None:
        teacher = config.distillation
        assert teacher.teacher is not None
        self._model = load_served(teacher.teacher, teacher, config.model.dtype, config.model.head_dtype)
        self._forward = ForwardBackward(config, end_token_ids, self._model.device)
        self._turn = asyncio.Lock()

    async def logprobs(self, sequences: Sequence[TrainSequence]) -> list[np.ndarray]:
        async with self._turn:
            found = await asyncio.to_thread(self._forward.with_reference, self._model, sequences)
        return [s.reference_logprobs for s in found if s.reference_logprobs is not None]

    async def shutdown(self) -> None: ...
