"""TransformerLM: a decoder-only language model of Llama's architecture, in plain torch.

It consists of token embeddings, pre-norm blocks, a final norm and the output layer. Parameters have the names
of Llama's Hugging Face layout, such as `model.layers.0.self_attn.q_proj.weight`, so that checkpoints, weight
sync and vLLM need no translation.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Cache, DynamicCache, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from grpo_ray.learning.policy_model import PolicyModel, TreeAttention
from grpo_ray.learning.transformer_lm.layers import Block, Context, RMSNorm, rotary_angles


class Decoder(nn.Module):
    """Token ids to hidden states `[batch, seq, hidden]`, before the output layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim, self.theta = config.head_dim, config.rope_parameters["rope_theta"]
        self.checkpointing: dict[str, Any] | None = None  # options of `checkpoint`; None: activations are kept
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: Tensor, position_ids: Tensor, context: Context) -> Tensor:
        x: Tensor = self.embed_tokens(input_ids)
        angles = rotary_angles(position_ids, self.head_dim, self.theta)
        for block in self.layers:
            if self.checkpointing is not None and context.cache is None and torch.is_grad_enabled():
                x = checkpoint(block, x, angles, context, **self.checkpointing)
            else:
                x = block(x, angles, context)
        output: Tensor = self.norm(x)
        return output


class TransformerLM(PolicyModel):
    """The language model, with the interface of a policy (see PolicyModel).

    Weights are drawn from torch's generator: N(0, initializer_range), divided by sqrt(2 num_layers) where they
    write to the residual stream (Radford et al. 2019, section 2.3); norms are 1.
    """

    def __init__(self, config: LlamaConfig) -> None:
        """Initialise from the configuration of a plain Llama (see `check_llama`)."""
        super().__init__()
        self.config = config
        self.generation_config = GenerationConfig.from_model_config(config)
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                adds_up = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = 1 / math.sqrt(2 * config.num_hidden_layers) if adds_up else 1.0
                nn.init.normal_(parameter, std=scale * config.initializer_range)

    def tie_weights(self) -> None:
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        past_key_values: Cache | None = None, use_cache: bool = False, tree: TreeAttention | None = None,
        logits_to_keep: int = 0,
    ) -> CausalLMOutputWithPast:  # fmt: skip
        """Compute the logits of the token after each position.

        Args:
            input_ids: `[batch, seq]`; with a cache, the tokens that are not in it yet.
            attention_mask: `[batch, tokens in the cache + seq]`, 0 at padding. Padding on the right needs no
                mask: no real token attends to it.
            position_ids: `[batch or 1, seq]`; default: counted from the number of tokens in the cache.
            past_key_values: the cache of earlier tokens; extended in place.
            use_cache: return a cache for the next call.
            tree: attention over one packed row, instead of mask and cache; then no shape is checked.
            logits_to_keep: return the logits of the last N positions only; 0 means all.

        Returns:
            Logits `[batch, positions kept, vocab]`, and the cache if there is one.

        Raises:
            ValueError: a tensor has another shape.
        """
        output = self.base_model(input_ids, attention_mask, position_ids, past_key_values, use_cache, tree)
        logits = self.lm_head(output.last_hidden_state[:, -logits_to_keep:])
        return CausalLMOutputWithPast(logits=logits, past_key_values=output.past_key_values)

    def base_model(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        past_key_values: Cache | None = None, use_cache: bool = False, tree: TreeAttention | None = None,
    ) -> BaseModelOutputWithPast:  # fmt: skip
        """Compute what the output layer is applied to; the arguments are those of `forward`."""
        if tree is not None:
            assert position_ids is not None
            return BaseModelOutputWithPast(self.model(input_ids, position_ids, Context(tree=tree)), None)
        cache = past_key_values
        if cache is None and use_cache:
            cache = DynamicCache()
        num_seen = 0 if cache is None else cache.get_seq_length()
        _check_shapes(input_ids, attention_mask, position_ids, num_seen)
        if position_ids is None:
            position_ids = torch.arange(num_seen, num_seen + input_ids.shape[1], device=input_ids.device)[None]
        allowed = _allowed(input_ids, attention_mask, num_seen)
        return BaseModelOutputWithPast(self.model(input_ids, position_ids, Context(allowed, cache)), cache)

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Keep only the blocks' inputs for the backward pass, and what the options say; recompute the rest."""
        self.model.checkpointing = gradient_checkpointing_kwargs or {"use_reentrant": False}

    def save_pretrained(
        self, folder: Path | str, state_dict: dict[str, Tensor] | None = None, max_shard_size: str = "5GB"
    ) -> None:
        """Write the folder that transformers' Llama with these weights writes.

        Args:
            state_dict: written instead of the model's own weights.
            max_shard_size: of one file; a larger model is written to several.

        Raises:
            OSError, SafetensorError: the files could not be written.
        """
        with torch.device("meta"):
            written = LlamaForCausalLM(self.config).to(self.lm_head.weight.dtype)
        written.generation_config = self.generation_config
        written.save_pretrained(
            folder, state_dict=state_dict or self.state_dict(), max_shard_size=max_shard_size
        )


def _check_shapes(
    input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, num_seen: int
) -> None:
    if input_ids.ndim != 2 or not input_ids.numel():
        raise ValueError(f"input_ids: expected [batch, seq], not empty; got {list(input_ids.shape)}")
    batch, length = input_ids.shape
    if attention_mask is not None and attention_mask.shape != (batch, num_seen + length):
        raise ValueError(
            f"attention_mask: expected {[batch, num_seen + length]}, a column for each token in the cache "
            f"({num_seen}) and in input_ids ({length}); got {list(attention_mask.shape)}"
        )
    if position_ids is not None and position_ids.shape not in ((batch, length), (1, length)):
        raise ValueError(f"position_ids: expected {[batch, length]}; got {list(position_ids.shape)}")


def _allowed(input_ids: Tensor, attention_mask: Tensor | None, num_seen: int) -> Tensor | None:
    """Return the keys that each query may attend to, `[batch or 1, 1, seq, keys]` bool; None: all before it."""
    length, num_keys = input_ids.shape[1], num_seen + input_ids.shape[1]
    if attention_mask is None and not num_seen:
        return None
    ones = torch.ones(length, num_keys, dtype=torch.bool, device=input_ids.device)
    causal = ones.tril(num_seen)[None, None]
    if attention_mask is None:
        return causal
    itself = causal & ones.triu(num_seen)  # padding attends to itself: a softmax over nothing would be NaN
    return causal & attention_mask.bool()[:, None, None, :] | itself
