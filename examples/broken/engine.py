"""An engine that returns the tokens of its text instead of those that it sampled."""

from typing import Any

import numpy as np

from grpo_ray.config import Config
from grpo_ray.engines import make_engine
from grpo_ray.learning.model_files import load_tokenizer
from grpo_ray.types import Completion, SamplingSettings


class RetokenizingEngine:
    """The reference engine behind an interface of text: each response is decoded, stripped and encoded again.

    Chat messages are kept as text without the white space around them, and text does not determine its tokens.
    The logprobs remain those of the sampled tokens, so from the first difference on they belong to others.
    """

    def __init__(self, config: Config, model_path: str, max_model_len: int, seed: int) -> None:
        inner = config.changed(generator={"engine": "torch"})
        self._engine = make_engine(inner, model_path, max_model_len, seed)
        self._tokenizer = load_tokenizer(model_path, config.model.trust_remote_code)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(
        self, prompt_token_ids: tuple[int, ...], settings: SamplingSettings
    ) -> tuple[Completion, ...]:
        """Sample `settings.num_samples` completions and encode their text again."""
        completions = await self._engine.generate(prompt_token_ids, settings)
        return tuple(map(self._encoded_again, completions))

    def _encoded_again(self, completion: Completion) -> Completion:
        token_ids = self._tokenizer.encode(completion.text.strip(), add_special_tokens=False)
        if not token_ids:
            return completion
        ids = np.asarray(token_ids, np.int32)
        logprobs, versions = np.zeros(len(ids), np.float32), np.full(len(ids), completion.versions[0], np.int32)
        length = min(len(ids), len(completion.logprobs))
        logprobs[:length] = completion.logprobs[:length]
        return Completion(completion.text, ids, logprobs, versions, completion.finish_reason)
