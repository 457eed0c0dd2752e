"""TransformerLM: a decoder-only language model of Llama's architecture, in plain torch.

Token embedding, pre-norm blocks of grouped-query attention with rotary positions and SwiGLU, a last norm and
the output layer. Parameters have the names of Llama's Hugging Face layout, such as
`model.layers.0.self_attn.q_proj.weight`, so that checkpoints, weight sync and vLLM need no translation.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from einops import rearrange, repeat
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint
from transformers import GenerationConfig, LlamaConfig

OUTPUT_LAYER = "lm_head.weight"


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis (Zhang & Sennrich 2019, Eq. 4), in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:  # [..., size]
        wide = x.float()
        normalized = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normalized.to(x.dtype)


def rotary_angles(position_ids: Tensor, head_dim: int, theta: float) -> Tensor:
    """float32 radians `[batch, seq, head_dim / 2]` of positions `[batch, seq]`: m theta^(-2i / head_dim).

    Su et al. 2021 (RoFormer), Eq. 15. Computed anew, not kept as a buffer that bfloat16 would round.
    """
    exponents = torch.arange(0, head_dim, 2, device=position_ids.device).float() / head_dim
    return position_ids[..., None].float() * (1.0 / theta**exponents)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn each pair of `x`'s components by its angle (Su et al. 2021, Eq. 34), so that `q . k` of two
    rotated vectors depends on the distance of their positions alone.

    The paper pairs neighbours; Llama's Hugging Face layout pairs component i with i + head_dim / 2.

    Args:
        x: `[batch, heads, seq, head_dim]`.
        angles: `[batch, seq, head_dim / 2]`, radians.
    """
    cos, sin = (rearrange(turn, "batch seq half -> batch 1 seq half") for turn in (angles.cos(), angles.sin()))
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class KeyValueCache:
    """Each layer's rotated keys and values of the tokens seen so far, `[batch, kv_heads, tokens, head_dim]`."""

    def __init__(self, num_layers: int) -> None:
        self._layers: list[tuple[Tensor, Tensor] | None] = [None] * num_layers

    @property
    def num_tokens(self) -> int:
        """Of the last layer, the last to be extended: a forward pass in progress is not counted yet."""
        last = self._layers[-1]
        return 0 if last is None else last[0].shape[2]

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append those of new tokens, `[batch, kv_heads, seq, head_dim]`; returns the layer's all."""
        if (past := self._layers[layer]) is not None:
            keys, values = torch.cat([past[0], keys], dim=2), torch.cat([past[1], values], dim=2)
        self._layers[layer] = keys, values
        return keys, values


class Attention(nn.Module):
    """Causal attention in which `num_heads / num_kv_heads` query heads share a key and value head.

    Grouped-query attention (Ainslie et al. 2023); with as many of both it is multi-head attention.
    """

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.group_size = num_heads // num_kv_heads
        width, kv_width = num_heads * self.head_dim, num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x: Tensor, angles: Tensor, allowed: Tensor | None, cache: KeyValueCache | None) -> Tensor:
        """`x` `[batch, seq, hidden]`; `allowed` `[batch or 1, 1, seq, keys]`, None: plainly causal."""
        queries, keys, values = (
            rearrange(projected, "batch seq (heads dim) -> batch heads seq dim", dim=self.head_dim)
            for projected in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        queries, keys = rotate(queries, angles), rotate(keys, angles)
        if cache is not None:
            keys, values = cache.extend(self.layer, keys, values)
        keys, values = (
            repeat(shared, "batch heads keys dim -> batch (heads group) keys dim", group=self.group_size)
            for shared in (keys, values)
        )
        mixed = scaled_dot_product_attention(
            queries, keys, values, attn_mask=allowed, is_causal=allowed is None
        )
        return self.o_proj(rearrange(mixed, "batch heads seq dim -> batch seq (heads dim)"))


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))` (Shazeer 2020, Eq. 6); `[batch, seq, hidden]` to the same."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention and SwiGLU, each added to what it reads, normalized before (pre-norm)."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, angles: Tensor, allowed: Tensor | None, cache: KeyValueCache | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles, allowed, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Token ids to hidden states `[batch, seq, hidden]`, before the output layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim, self.theta = config.head_dim, config.rope_parameters["rope_theta"]
        self.recomputes = False  # each block's activations, in the backward pass
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, allowed: Tensor | None, cache: KeyValueCache | None
    ) -> Tensor:
        x = self.embed_tokens(input_ids)
        angles = rotary_angles(position_ids, self.head_dim, self.theta)
        for block in self.layers:
            if self.recomputes and cache is None and torch.is_grad_enabled():
                x = checkpoint(block, x, angles, allowed, cache, use_reentrant=False)
            else:
                x = block(x, angles, allowed, cache)
        return self.norm(x)


@dataclass(frozen=True)
class TransformerOutput:
    logits: Tensor  # [batch, positions kept, vocab]
    past_key_values: KeyValueCache | None


class TransformerLM(nn.Module):
    """The language model, with what a policy is asked for (see PolicyModel).

    Weights are drawn from torch's generator: N(0, initializer_range), those that write to the residual stream
    divided by sqrt(2 num_layers) (Radford et al. 2019, section 2.3); norms are 1.
    """

    def __init__(self, config: LlamaConfig) -> None:
        """`config` is of a plain Llama (see `llama_layout.check_plain`)."""
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
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: KeyValueCache | None = None,
        use_cache: bool = False,
        logits_to_keep: int = 0,
    ) -> TransformerOutput:
        """Logits of the token after each position.

        Args:
            input_ids: `[batch, seq]`; with a cache, the tokens that it has not seen.
            attention_mask: `[batch, tokens in the cache + seq]`, 0 at padding. Padding on the right needs
                none: no real token sees it.
            position_ids: `[batch or 1, seq]`; default: counted from the number of tokens in the cache.
            past_key_values: of the tokens before; extended in place.
            use_cache: return a cache to go on with.
            logits_to_keep: only those of the last so many positions; 0 is all.

        Returns:
            Logits `[batch, positions kept, vocab]`, and the cache if there is one.

        Raises:
            ValueError: a tensor's shape is none of these.
        """
        cache = past_key_values
        if cache is None and use_cache:
            cache = KeyValueCache(len(self.model.layers))
        num_seen = 0 if cache is None else cache.num_tokens
        _check_shapes(input_ids, attention_mask, position_ids, num_seen)
        if position_ids is None:
            position_ids = torch.arange(num_seen, num_seen + input_ids.shape[1], device=input_ids.device)[None]
        allowed = _allowed(input_ids, attention_mask, num_seen)
        hidden = self.model(input_ids, position_ids, allowed, cache)
        return TransformerOutput(self.lm_head(hidden[:, -logits_to_keep:]), cache)

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    def gradient_checkpointing_enable(self) -> None:
        """Keep only the blocks' inputs for the backward pass, and compute the rest again."""
        self.model.recomputes = True

    def save_pretrained(self, folder: Path | str, state_dict: dict[str, Tensor] | None = None) -> None:
        """Write `config.json`, `generation_config.json` and `model.safetensors` in Llama's layout.

        Args:
            state_dict: written instead of the model's own weights.

        Raises:
            OSError, SafetensorError: it could not be written.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        weights = dict(self.state_dict() if state_dict is None else state_dict)
        if self.config.tie_word_embeddings:
            weights.pop(OUTPUT_LAYER, None)
        self.config.architectures = ["LlamaForCausalLM"]
        self.config.dtype = self.lm_head.weight.dtype
        self.config.save_pretrained(folder)
        self.generation_config.save_pretrained(folder)
        save_file(
            {name: tensor.contiguous() for name, tensor in weights.items()},
            folder / "model.safetensors",
            metadata={"format": "pt"},
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
    """Which keys each query may attend to, `[batch or 1, 1, seq, keys]` bool; None: every earlier one."""
    length, num_keys = input_ids.shape[1], num_seen + input_ids.shape[1]
    if attention_mask is None and not num_seen:
        return None
    ones = torch.ones(length, num_keys, dtype=torch.bool, device=input_ids.device)
    causal = ones.tril(num_seen)[None, None]
    if attention_mask is None:
        return causal
    itself = causal & ones.triu(num_seen)  # padding sees itself: a softmax over nothing would be NaN
    return causal & attention_mask.bool()[:, None, None, :] | itself
