"""The sampler of the reference engine: one batch of sequences, token by token, in plain torch."""

from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from grpo_ray.engines import sample_seed
from grpo_ray.learning.policy_model import PolicyModel
from grpo_ray.types import Completion, SamplingSettings


@dataclass
class Sequence:
    """A partial response; it has its own draws, `uniforms`, so its tokens do not depend on its neighbours."""

    prompt: tuple[int, ...]
    settings: SamplingSettings
    uniforms: torch.Tensor  # [max_tokens] in [0, 1)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    text: str = ""
    num_early: int = 0  # characters of the text at which no stop string may end: those before `min_tokens`
    finish_reason: str = ""

    def append(self, token: int, logprob: float, version: int, tokenizer: PreTrainedTokenizerBase) -> None:
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        self.text = tokenizer.decode(self.token_ids, skip_special_tokens=True)
        settings, length = self.settings, len(self.token_ids)
        if length < settings.min_tokens:
            self.num_early = len(self.text)
        starts = [(self.text.find(s, max(0, self.num_early - len(s) + 1)), len(s)) for s in settings.stop]
        ends = [start + size for start, size in starts if start >= 0]
        if token in settings.end_token_ids:
            self.finish_reason = "stop"
        elif ends and length >= settings.min_tokens:
            self.text, self.finish_reason = self.text[: min(ends)], "stop"
        elif length == settings.max_tokens:
            self.finish_reason = "length"

    def completion(self) -> Completion:
        return Completion(
            self.text,
            np.asarray(self.token_ids, dtype=np.int32),
            np.asarray(self.logprobs, dtype=np.float32),
            np.asarray(self.versions, dtype=np.int32),
            self.finish_reason,
        )


def new_sequences(prompt: tuple[int, ...], settings: SamplingSettings, seed: int) -> list[Sequence]:
    """Return one sequence per sample; each draws as a request of its own with `sample_seed` would."""
    seeds = [sample_seed(seed, sample) for sample in range(settings.num_samples)]
    # NumPy hashes the whole seed; torch's CPU generator would only use its lower 32 bits.
    draws = [np.random.default_rng(each).random(settings.max_tokens) for each in seeds]
    return [Sequence(prompt, settings, torch.from_numpy(row)) for row in draws]


class SamplingBatch:
    """Left-padded sequences over one key-value cache; call `forget_cache` after the weights change."""

    def __init__(
        self, model: PolicyModel, tokenizer: PreTrainedTokenizerBase, sequences: list[Sequence]
    ) -> None:
        self._model, self._tokenizer = model, tokenizer
        self.sequences = sequences
        self._cache: object = None
        width = max(len(s.prompt) for s in sequences)
        rows = [[0] * (width - len(s.prompt)) + list(s.prompt) for s in sequences]
        self._input_ids = torch.tensor(rows, device=model.device)  # [batch, seq so far]
        self._mask = torch.tensor([[0] * (width - len(s.prompt)) + [1] * len(s.prompt) for s in sequences])
        self._mask = self._mask.to(model.device)

    @property
    def is_done(self) -> bool:
        return all(s.finish_reason for s in self.sequences)

    def forget_cache(self) -> None:
        self._cache = None

    @torch.inference_mode()
    def step(self, version: int) -> None:
        """Sample one more token for every unfinished sequence."""
        logprobs = self._next_logprobs()  # [batch, vocab]
        # Unfinished sequences all have the same length; a finished one may have no draw left, and needs none.
        position = max(len(s.token_ids) for s in self.sequences)
        uniforms = torch.stack([s.uniforms[min(position, len(s.uniforms) - 1)] for s in self.sequences])
        tokens = _inverse_cdf(logprobs.exp(), uniforms.to(logprobs.device))  # [batch]
        drawn = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
        for sequence, token, logprob in zip(self.sequences, tokens.tolist(), drawn, strict=True):
            if not sequence.finish_reason:
                sequence.append(token, logprob, version, self._tokenizer)
        self._input_ids = torch.cat([self._input_ids, tokens[:, None]], dim=1)
        self._mask = torch.cat([self._mask, torch.ones_like(self._mask[:, :1])], dim=1)

    def _next_logprobs(self) -> torch.Tensor:
        new = self._input_ids if self._cache is None else self._input_ids[:, -1:]
        # The model may have no position for all tokens that a finished sequence still gets.
        last = max(len(s.prompt) + s.settings.max_tokens for s in self.sequences) - 1
        positions = (self._mask.cumsum(1) - 1).clamp(0, last)[:, -new.shape[1] :]
        output = self._model(
            input_ids=new, attention_mask=self._mask, position_ids=positions,
            past_key_values=self._cache, use_cache=True, logits_to_keep=1,
        )  # fmt: skip
        self._cache = output.past_key_values
        logits: torch.Tensor = output.logits[:, -1].float()
        for row, sequence in enumerate(self.sequences):
            if len(sequence.token_ids) < sequence.settings.min_tokens:
                logits[row, list(sequence.settings.end_token_ids)] = -torch.inf
            logits[row] = _shaped(logits[row], sequence.settings)
        return logits.log_softmax(-1)


def _shaped(logits: torch.Tensor, settings: SamplingSettings) -> torch.Tensor:
    """Return the logits `[vocab]` to draw from; temperature 0 leaves only the most likely token."""
    if settings.temperature == 0.0:
        greedy = torch.full_like(logits, -torch.inf)
        greedy[logits.argmax()] = 0.0
        return greedy
    logits = logits / settings.temperature
    return logits if settings.top_p == 1.0 else _nucleus(logits, settings.top_p)


def _nucleus(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the smallest set of most likely tokens with mass `top_p` (Holtzman et al. 2020); `[vocab]`."""
    ordered, tokens = logits.sort(descending=True)
    probabilities = ordered.softmax(-1)
    mass_before = probabilities.cumsum(-1) - probabilities
    return logits.index_fill(0, tokens[mass_before >= top_p], -torch.inf)


def _inverse_cdf(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return the token with the interval of the cumulative distribution that contains the draw; `[batch]`."""
    cumulative = probabilities.double().cumsum(-1)
    tokens = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)[:, 0]
    return tokens.clamp_max(probabilities.shape[-1] - 1)
