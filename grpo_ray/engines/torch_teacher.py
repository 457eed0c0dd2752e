"""A teacher in torch, in the Teacher's own process: the Learner's own way of computing logprobs."""

import asyncio
from collections.abc import Sequence

import numpy as np
import torch

from grpo_ray.config import Config
from grpo_ray.learning.device import hold_to_cores
from grpo_ray.learning.forward_backward import ForwardBackward
from grpo_ray.learning.loading import cast_parameters, load_policy
from grpo_ray.learning.policy_model import with_head_dtype
from grpo_ray.learning.sequences import TrainSequence


class TorchTeacher:
    """An engine that computes one group after another, each prompt once if the model allows it.

    Which groups come together changes no value, so a synchronous run is resumed exactly.
    """

    def __init__(self, config: Config, end_token_ids: tuple[int, ...]) -> None:
        teacher = config.distillation
        assert teacher.teacher is not None
        device = torch.device("cuda" if teacher.num_gpus else "cpu")
        if device.type == "cpu":
            torch.set_num_threads(teacher.num_threads)
            hold_to_cores(teacher.cpu_cores)
        self._model = with_head_dtype(load_policy(teacher.teacher).to(device), config.model.head_dtype)
        cast_parameters(self._model.parameters(), getattr(torch, config.model.dtype))
        self._forward = ForwardBackward(config, end_token_ids, device)
        self._turn = asyncio.Lock()

    async def logprobs(self, sequences: Sequence[TrainSequence]) -> list[np.ndarray]:
        async with self._turn:
            found = await asyncio.to_thread(self._forward.with_reference, self._model, sequences)
        return [s.reference_logprobs for s in found if s.reference_logprobs is not None]

    async def shutdown(self) -> None: ...
