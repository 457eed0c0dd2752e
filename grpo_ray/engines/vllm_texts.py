"""Texts of vLLM's responses at less than its own cost: it decodes every token twice, as it is drawn.

One text is for the response, and needed then only if a stop string may end it. The other stands beside the
token's logprob, and nothing reads it. On a CPU core the two take 5 and 8 microseconds per token; decoding a
finished response takes less than one.
"""

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from tokenizers.decoders import ByteLevel, DecodeStream
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.logprobs import LogprobsProcessor

processor: Any = LogprobsProcessor
original = processor.from_new_request.__func__
detokenizer: Any = IncrementalDetokenizer
detokenized = detokenizer.from_new_request.__func__


def omit_texts_of_logprobs() -> None:
    """Make vLLM's logprobs of this process come without texts, as if a request had asked for no text at all."""

    def without_tokenizer(cls: Any, tokenizer: object, request: object) -> Any:
        return original(cls, None, request)

    processor.from_new_request = classmethod(without_tokenizer)


def correct_stop_strings() -> None:
    """Let stop strings end a response of `min_tokens` tokens, as vLLM's need one more; seek none in prompts."""

    def corrected(cls: Any, tokenizer: Any, request: Any) -> Any:
        made, params = detokenized(cls, tokenizer, request), request.sampling_params
        made.min_tokens = max(0, params.min_tokens - 1)
        if hasattr(made, "stream") and _is_cut(tokenizer, tuple(request.prompt_token_ids[-8:])):
            made.stream = DecodeStream(skip_special_tokens=params.skip_special_tokens)
        return made

    detokenizer.from_new_request = classmethod(corrected)


@functools.lru_cache(1024)  # a group's samples ask for one
def _is_cut(tokenizer: Any, last_ids: tuple[int, ...]) -> bool:
    """Return True if the prompt with these last tokens ends within a character.

    A stream that begins with such a prompt would yield all of it as the beginning of the response.
    """
    ending: str = tokenizer.decode(last_ids, skip_special_tokens=True)
    return ending.endswith("\N{REPLACEMENT CHARACTER}")


def decode(tokenizer: Any, prompt: Sequence[int], response: Sequence[int], params: Any) -> str:
    """Return the text that vLLM makes of a response token by token, to the byte; `params` are the request's."""
    backend = getattr(tokenizer, "_tokenizer", None)
    context = [] if _is_cut(tokenizer, tuple(prompt[-8:])) else list(prompt)
    if backend is not None and isinstance(backend.decoder, ByteLevel):
        # The text is the tokens' bytes, so one step over all of them yields what many steps do. It yields None
        # if the text ends in the middle of a character, which vLLM leaves out.
        stream = DecodeStream(ids=context, skip_special_tokens=params.skip_special_tokens)
        text: str | None = stream.step(backend, list(response))
        if text is not None:
            return text
    request: Any = SimpleNamespace(
        request_id="", prompt_token_ids=context, prompt_embeds=None, sampling_params=params
    )
    whole = IncrementalDetokenizer.from_new_request(tokenizer, request)
    whole.update(list(response), stop_terminated=False)
    rest: str = whole.get_next_output_text(finished=True, delta=False)
    return rest
