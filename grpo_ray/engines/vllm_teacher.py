"""A teacher in vLLM: the logprobs of a prompt that holds the whole sequence."""

import asyncio
import itertools
from collections.abc import Sequence

import numpy as np

from grpo_ray.config.model import HeadDtype
from grpo_ray.config.sampling import DistillationConfig
from grpo_ray.engines.vllm_engine import common_arguments, only_output
from grpo_ray.learning.model_files import located
from grpo_ray.learning.sequences import TrainSequence


class VllmTeacher:
    """vLLM without sampling: each sequence is one request, and all of a group run concurrently.

    vLLM reads no cached prefix for such requests, so a prompt is computed once per completion.
    """

    def __init__(
        self, config: DistillationConfig, dtype: str, max_model_len: int, head_dtype: HeadDtype = "model"
    ) -> None:
        common = common_arguments(config, dtype, head_dtype)  # first: it sets the environment
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from grpo_ray.engines.vllm_texts import omit_texts_of_logprobs

        omit_texts_of_logprobs()
        assert config.teacher is not None
        # vLLM draws one token after the sequence, which needs a place.
        self._llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=located(config.teacher, weights=True),
                max_model_len=max_model_len + 1,
                trust_remote_code=False,
                **common,
            )
        )
        self._request_ids = itertools.count()

    async def logprobs(self, sequences: Sequence[TrainSequence]) -> list[np.ndarray]:
        return await asyncio.gather(*map(self._of_one, sequences))

    async def _of_one(self, sequence: TrainSequence) -> np.ndarray:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        tokens = sequence.tokens().tolist()
        request = self._llm.generate({"prompt_token_ids": tokens}, params, str(next(self._request_ids)))
        found = (await only_output(request)).prompt_logprobs
        assert found.token_ids == tokens[1:]
        return sequence.sampled(np.asarray(found.logprobs, np.float32)[len(sequence.prompt_token_ids) - 1 :])

    async def shutdown(self) -> None:
        await asyncio.to_thread(self._llm.shutdown)
        del self._llm  # now, while the modules that its finalizer calls are still loaded
