"""The layers of a Llama: RMSNorm, rotary positions, grouped-query attention with a cache, and SwiGLU."""

from dataclasses import dataclass

import torch
from einops import rearrange, repeat
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu
from transformers import Cache, LlamaConfig

from grpo_ray.learning.policy_model import TreeAttention


class RMSNorm(nn.RMSNorm):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis (Zhang & Sennrich 2019, Eq. 4), in float32."""

    def forward(self, x: Tensor) -> Tensor:  # [..., size]
        normalized = rms_norm(x.float(), self.normalized_shape, eps=self.eps)
        return self.weight * normalized.to(x.dtype)


def rotary_angles(position_ids: Tensor, head_dim: int, theta: float) -> Tensor:
    """Return angles `[batch, seq, head_dim / 2]` of positions `[batch, seq]`: m theta^(-2i / head_dim).

    In float32 radians (Su et al. 2021, RoFormer, Eq. 15). Computed on each call: bfloat16 would round a buffer.
    """
    exponents = torch.arange(0, head_dim, 2, device=position_ids.device).float() / head_dim
    return position_ids[..., None].float() * (1.0 / theta**exponents)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate each pair of components of `x` by its angle (Su et al. 2021, Eq. 34).

    The product `q . k` of two rotated vectors then depends only on the distance of their positions. The paper
    pairs neighbouring components; Llama's Hugging Face layout pairs component i with i + head_dim / 2.

    Args:
        x: `[batch, heads, seq, head_dim]`.
        angles: `[batch, seq, head_dim / 2]`, radians.
    """
    cos, sin = (rearrange(turn, "batch seq half -> batch 1 seq half") for turn in (angles.cos(), angles.sin()))
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


@dataclass(frozen=True)
class Context:
    """The tokens that each token attends to: by default, all tokens before it in its row."""

    allowed: Tensor | None = None  # bool [batch or 1, 1, seq, keys]
    cache: Cache | None = None  # each layer's rotated keys and values of earlier tokens
    tree: TreeAttention | None = None  # the batch is one row of segments (learning/families.py)


class Attention(nn.Module):
    """Causal attention in which `num_heads / num_kv_heads` query heads share a key and value head.

    Grouped-query attention (Ainslie et al. 2023); with equal numbers of heads it is multi-head attention.
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

    def forward(self, x: Tensor, angles: Tensor, context: Context) -> Tensor:
        """Attend over `x` `[batch, seq, hidden]`."""
        queries, keys, values = (
            rearrange(projected, "batch seq (heads dim) -> batch heads seq dim", dim=self.head_dim)
            for projected in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        queries, keys = rotate(queries, angles), rotate(keys, angles)
        if context.tree is not None:
            q, k, v = (
                rearrange(states, "1 heads seq dim -> seq heads dim") for states in (queries, keys, values)
            )
            mixed = rearrange(context.tree(q, k, v), "seq heads dim -> 1 seq (heads dim)")
        else:
            mixed = self._attend(queries, keys, values, context)
        output: Tensor = self.o_proj(mixed)
        return output

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, context: Context) -> Tensor:
        if context.cache is not None:
            keys, values = context.cache.update(keys, values, self.layer)
        keys, values = (
            repeat(shared, "batch heads keys dim -> batch (heads group) keys dim", group=self.group_size)
            for shared in (keys, values)
        )
        allowed = context.allowed
        mixed = scaled_dot_product_attention(
            queries, keys, values, attn_mask=allowed, is_causal=allowed is None
        )
        return rearrange(mixed, "batch heads seq dim -> batch seq (heads dim)")


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))` (Shazeer 2020, Eq. 6); `[batch, seq, hidden]` to the same."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class Block(nn.Module):
    """Attention and SwiGLU, each with a residual connection and a norm in front (pre-norm)."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, angles: Tensor, context: Context) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles, context)
        output: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return output
