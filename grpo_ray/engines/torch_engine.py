"""The reference engine and teacher: torch in the actor's own process.

The engine serves fast tests, comparisons with vLLM, and models that vLLM does not support.
"""

import asyncio
import itertools
from collections import abc
from collections.abc import Mapping

import numpy as np
import torch

from grpo_ray.config import Config
from grpo_ray.config.model import HeadDtype, Implementation
from grpo_ray.config.sampling import EngineConfig
from grpo_ray.engines.sampling_batch import SamplingBatch, Sequence, new_sequences
from grpo_ray.learning.device import hold_to_cores
from grpo_ray.learning.forward_backward import ForwardBackward
from grpo_ray.learning.hub_format import in_hub_format, load_hub_format, model_tensors
from grpo_ray.learning.loading import cast_parameters, load_policy
from grpo_ray.learning.model_files import load_tokenizer
from grpo_ray.learning.policy_model import PolicyModel, with_head_dtype
from grpo_ray.learning.sequences import TrainSequence
from grpo_ray.transfer.kept_weights import KeptWeights
from grpo_ray.transfer.messages import WeightSnapshot
from grpo_ray.transfer.snapshot import as_tensor, unpack_weights
from grpo_ray.types import Completion, SamplingSettings

_Waiting = tuple[list[Sequence], "asyncio.Future[tuple[Completion, ...]]"]


def load_served(
    path: str, config: EngineConfig, dtype: str, head_dtype: HeadDtype, trust_remote_code: bool = False,
    implementation: Implementation = "transformers",
) -> PolicyModel:  # fmt: skip
    """Load a model in `dtype` on the configured device, with this process held to the configured cores."""
    if not config.num_gpus:
        torch.set_num_threads(config.num_threads)
        hold_to_cores(config.cpu_cores)
    model = load_policy(path, trust_remote_code, implementation).to("cuda" if config.num_gpus else "cpu")
    cast_parameters(with_head_dtype(model, head_dtype).parameters(), getattr(torch, dtype))
    return model


class TorchEngine:
    """An engine that samples all waiting requests as one batch, and finishes it before the next.

    In a synchronous run each request is a batch of its own: slower, but its samples then depend on the weights,
    the prompt and the seed alone, to the last bit.
    """

    def __init__(self, config: Config, model_path: str, max_model_len: int, seed: int) -> None:
        generator, model, trust = config.generator, config.model, config.model.trust_remote_code
        self._tokenizer = load_tokenizer(model_path, trust)
        self._model = load_served(
            model_path, generator, model.dtype, model.head_dtype, trust, model.implementation
        )
        self._version = 0
        self._staged: dict[str, torch.Tensor] = {}
        self._kept = KeptWeights()
        self._seeds = itertools.count(seed << 32)
        self._max_num_seqs, self._recompute_kv = generator.max_num_seqs, config.weight_sync.recompute_kv
        self._joins_requests = config.weight_sync.max_lag > 0
        self._waiting: list[_Waiting] = []
        self._batch: SamplingBatch | None = None
        self._server: asyncio.Task[None] | None = None
        self._stepping = asyncio.Lock()  # held for a token, or for a whole weight update

    async def start(self, version: int) -> None:
        self._version = version

    async def generate(
        self, prompt_token_ids: tuple[int, ...], settings: SamplingSettings
    ) -> tuple[Completion, ...]:
        seed = next(self._seeds) if settings.seed is None else settings.seed
        finished: asyncio.Future[tuple[Completion, ...]] = asyncio.get_running_loop().create_future()
        self._waiting.append((new_sequences(prompt_token_ids, settings, seed), finished))
        if self._server is None or self._server.done():
            self._server = asyncio.create_task(self._serve())
        return await finished

    async def _serve(self) -> None:
        while taken := self._take_waiting():
            try:
                await self._sample([sequence for sequences, _ in taken for sequence in sequences])
            except Exception as error:
                for _, finished in taken:
                    if not finished.cancelled():
                        finished.set_exception(error)
                continue
            for sequences, finished in taken:
                if not finished.cancelled():
                    finished.set_result(tuple(sequence.completion() for sequence in sequences))

    def _take_waiting(self) -> list[_Waiting]:
        """Take as many requests as fit into `max_num_seqs`, and at least one; skip cancelled ones."""
        self._waiting = [request for request in self._waiting if not request[1].cancelled()]
        taken, self._waiting = self._waiting[:1], self._waiting[1:]
        if not self._joins_requests:
            return taken
        while self._waiting and sum(len(s) for s, _ in [*taken, self._waiting[0]]) <= self._max_num_seqs:
            taken.append(self._waiting.pop(0))
        return taken

    async def _sample(self, sequences: list[Sequence]) -> None:
        self._batch = SamplingBatch(self._model, self._tokenizer, sequences)
        while not self._batch.is_done:
            async with self._stepping:
                await asyncio.to_thread(self._batch.step, self._version)
        self._batch = None

    async def stage(self, snapshot: WeightSnapshot) -> None:
        data = await asyncio.to_thread(self._kept.whole, snapshot)
        weights = dict(unpack_weights(snapshot.specs, as_tensor(data)))
        shapes = {name: weight.shape for name, weight in weights.items()}
        expected = dict(in_hub_format(self._model, model_tensors(self._model)))
        if shapes != {name: weight.shape for name, weight in expected.items()}:
            raise ValueError(_misfit(shapes, expected))
        self._staged = weights

    async def pause(self) -> None:
        await self._stepping.acquire()

    async def load(self) -> None:
        load_hub_format(self._model, self._staged)
        self._staged = {}

    async def finish(self, version: int) -> None:
        self._version = version
        if self._batch is not None and self._recompute_kv:
            self._batch.forget_cache()

    async def resume(self) -> None:
        self._stepping.release()

    async def sleep(self) -> None:
        """Do nothing: there is no memory to free on a CPU, and not sampling is enough."""

    async def wake(self) -> None: ...
    async def ping(self) -> None: ...

    async def shutdown(self) -> None:
        if self._server is not None:
            self._server.cancel()


def _misfit(shapes: Mapping[str, torch.Size], parameters: Mapping[str, torch.Tensor]) -> str:
    missing, unexpected = sorted(parameters.keys() - shapes.keys()), sorted(shapes.keys() - parameters.keys())
    reshaped = sorted(
        name for name, shape in shapes.items() if name in parameters and parameters[name].shape != shape
    )
    return (
        f"the snapshot does not fit the model: missing {missing}, unexpected {unexpected}, "
        f"of another shape {reshaped}"
    )


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

    async def logprobs(self, sequences: abc.Sequence[TrainSequence]) -> list[np.ndarray]:
        async with self._turn:
            found = await asyncio.to_thread(self._forward.with_reference, self._model, sequences)
        return [s.reference_logprobs for s in found if s.reference_logprobs is not None]

    async def shutdown(self) -> None: ...
