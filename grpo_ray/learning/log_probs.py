"""The policy's log-probabilities of response tokens, under the distribution that the sampler drew from."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from grpo_ray.config import SamplingConfig
from grpo_ray.learning.microbatch import MicroBatch
from grpo_ray.learning.policy_model import Float32Head, PolicyModel
from grpo_ray.objectives import chunked_log_probs, compute_entropy, token_log_probs
from grpo_ray.objectives.chunked import RULED_OUT

CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
SCALES = (
    "logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier", "logits_mup_width_multiplier",
)  # fmt: skip
"""Fields of transformers' configurations that cap or scale logits; small ones change by less than rounding."""


class ResponseLogProbs:
    """Log-probabilities and entropies at the sampling temperature, end tokens ruled out as when sampling.

    With `is_chunked` the output layer is applied chunk by chunk. That requires logits to be its product with
    the last hidden states; other models (with a bias, a scale or a cap on logits) get a tensor of all logits.
    """

    def __init__(
        self, sampling: SamplingConfig, end_token_ids: tuple[int, ...], is_chunked: bool = True
    ) -> None:
        self._sampling, self._end_token_ids = sampling, end_token_ids
        self.is_chunked = is_chunked

    def __call__(self, model: PolicyModel, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies, `[batch, resp]` float32 in nats, 0 outside the responses."""
        too_early = None
        if self._sampling.min_tokens and self._end_token_ids:
            too_early = batch.turn_places < self._sampling.min_tokens
        of_labels = self._chunked if self.is_chunked else self._plain
        log_probs, entropy = of_labels(model, batch, too_early)
        return batch.to_responses(log_probs), batch.to_responses(entropy)

    def _chunked(
        self, model: PolicyModel, batch: MicroBatch, too_early: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        layer = model.get_output_embeddings()
        hidden = model.base_model(**model_inputs(batch)).last_hidden_state
        hidden = hidden.flatten(0, 1).index_select(0, batch.sources)
        return chunked_log_probs(
            hidden, layer.weight, batch.labels, self._sampling.temperature, self._end_token_ids, too_early,
            in_float32=isinstance(layer, Float32Head), is_compiled=layer._compiled_call_impl is not None,
        )  # fmt: skip

    def _plain(self, model: PolicyModel, batch: MicroBatch, too_early: Tensor | None) -> tuple[Tensor, Tensor]:
        logits = model(**model_inputs(batch)).logits.flatten(0, 1).index_select(0, batch.sources).float()
        if self._sampling.temperature != 1.0:
            logits = logits / self._sampling.temperature
        if too_early is not None:
            is_end = torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device)
            for token in self._end_token_ids:
                is_end[token] = True
            logits = logits.masked_fill(too_early[:, None] & is_end, RULED_OUT)
        return token_log_probs(logits[None], batch.labels[None])[0], compute_entropy(logits)


def has_plain_output_layer(model: PolicyModel) -> bool:
    """Return whether the output layer has a weight alone, and the configuration names no change of logits.

    The rest of the model may still change its result.
    """
    layer, config = model.get_output_embeddings(), cast(Any, model).config.get_text_config()
    is_capped = any(getattr(config, name, None) is not None for name in CAPS)
    is_scaled = any(getattr(config, name, None) not in (None, 1) for name in SCALES)
    return type(layer) in (nn.Linear, Float32Head) and layer.bias is None and not (is_capped or is_scaled)


def model_inputs(batch: MicroBatch) -> dict[str, Any]:
    """Return the arguments of the model's forward pass."""
    inputs: dict[str, Any] = {"input_ids": batch.input_ids, "use_cache": False}
    if batch.attention is not None:
        # A mask of four axes is taken as it is, so that transformers makes none; the tree replaces it.
        no_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=batch.input_ids.device)
        inputs |= {"position_ids": batch.position_ids, "attention_mask": no_mask, "tree": batch.attention}
    return inputs
