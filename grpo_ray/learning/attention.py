"""Attention over a tree of segments, registered with transformers under the name `grpo_ray`.

`BlockAttention` runs anywhere, through torch's scaled_dot_product_attention on segments padded to blocks.
`VarlenAttention` gives the kernels of FlashAttention segments of any length without padding.
"""

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from grpo_ray.config.model import Attention
from grpo_ray.learning.families import NO_PARENT, SegmentTree, concatenated, padded
from grpo_ray.learning.policy_model import TreeAttention

NAME = "grpo_ray"
FULLEST = 0.75
"""Segments shorter than this share of a block's longest begin a new block."""
SHORT = 192
"""Queries per segment below which torch 2.13 on a CPU attends up to five times as fast in float32."""
HARMLESS = frozenset({"position_ids", "use_cache", "output_attentions", "output_router_logits"})
"""Options that transformers hands on to attention, none of which changes its result."""
Kernel = Callable[..., Tensor]
PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
"""The module with each kernel that torch does not bring along."""


@dataclass(frozen=True)
class Block:
    """Segments of similar length with the tokens that they attend to."""

    queries: Tensor  # int64 [segments, length]: tokens of the row; padding repeats token 0
    keys: Tensor  # int64 [segments, path]: the tokens before the segment, padded on the left, and its own
    is_allowed: Tensor | None  # bool [segments or 1, 1, length, path]; None: causal over the queries' tokens

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
        """Return `[segments * length, heads, head_dim]`."""
        dtype = queries.dtype
        if dtype == torch.bfloat16 and not keys.is_cuda and self.queries.shape[1] < SHORT:
            queries, keys, values = queries.float(), keys.float(), values.float()
        seen_keys, seen_values = _rows(keys, self.keys), _rows(values, self.keys)
        is_shared = queries.shape[1] != keys.shape[1]
        if is_shared and keys.is_cuda:  # its kernels that take a mask have one key head per query head
            group_size = queries.shape[1] // keys.shape[1]
            seen_keys, seen_values = (x.repeat_interleave(group_size, dim=1) for x in (seen_keys, seen_values))
        mixed = scaled_dot_product_attention(
            _rows(queries, self.queries), seen_keys, seen_values, attn_mask=self.is_allowed,
            is_causal=self.is_allowed is None, scale=scale, enable_gqa=is_shared and not keys.is_cuda,
        )  # fmt: skip
        return mixed.transpose(1, 2).flatten(0, 1).to(dtype)


@dataclass(frozen=True)
class BlockAttention:
    """One call of scaled_dot_product_attention per block."""

    blocks: tuple[Block, ...]
    places: Tensor  # int64 [tokens]: where each token's result is in the blocks' results, end to end

    @classmethod
    def of(cls, tree: SegmentTree) -> Self:
        blocks = _split(tree, [s for s, parent in enumerate(tree.parents) if parent == NO_PARENT])
        blocks += _split(tree, [s for s, parent in enumerate(tree.parents) if parent != NO_PARENT])
        own = [padded([tree.paths[s][tree.depths[s] :] for s in block]) for block in blocks]
        tokens = concatenated(rows.ravel() for rows in own)
        places = np.empty(tree.num_tokens, np.int64)
        places[tokens[tokens >= 0]] = np.flatnonzero(tokens >= 0)
        made = (_block(tree, block, rows) for block, rows in zip(blocks, own, strict=True))
        return cls(tuple(made), torch.from_numpy(places))

    # A compiled block would otherwise be compiled anew for each batch's numbers of segments.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, scale: float | None = None) -> Tensor:
        mixed = [block.attend(queries, keys, values, scale) for block in self.blocks]
        return torch.cat(mixed).index_select(0, self.places)


def _split(tree: SegmentTree, segments: list[int]) -> list[list[int]]:
    """Split the segments into blocks of similar lengths, longest first."""
    blocks: list[list[int]] = []
    for segment in sorted(segments, key=lambda s: (tree.lengths[s], tree.depths[s]), reverse=True):
        if not blocks or tree.lengths[segment] < FULLEST * tree.lengths[blocks[-1][0]]:
            blocks.append([])
        blocks[-1].append(segment)
    return blocks


def _block(tree: SegmentTree, segments: list[int], own: np.ndarray) -> Block:
    """Return the block of the segments; `own` are their tokens, `[segments, length]`, padded with -1."""
    queries = torch.from_numpy(own.clip(0))
    if all(tree.parents[s] == NO_PARENT for s in segments):
        return Block(queries, queries, None)
    before = padded([tree.paths[s][: tree.depths[s]] for s in segments], on_left=True)
    length = own.shape[1]
    is_causal = np.tril(np.ones((length, length), bool))
    is_token = before >= 0 if (before < 0).any() else np.ones((1, before.shape[1]), bool)
    is_before = np.broadcast_to(is_token[:, None], (len(is_token), length, before.shape[1]))
    is_own = np.broadcast_to(is_causal[None], (len(is_token), length, length))
    is_allowed = np.concatenate([is_before, is_own], axis=2)[:, None]
    keys = np.concatenate([before, own], axis=1).clip(0)
    return Block(queries, torch.from_numpy(keys), torch.from_numpy(is_allowed))


def _rows(tensor: Tensor, indices: Tensor) -> Tensor:
    """Return `[rows, heads, length, head_dim]` of `[tokens, heads, head_dim]` for `[rows, length]` tokens."""
    return tensor.index_select(0, indices.flatten()).view(*indices.shape, *tensor.shape[1:]).transpose(1, 2)


@dataclass(frozen=True)
class VarlenAttention:
    """One call of a kernel for segments of any length, each after the keys of its path.

    A query at the end of its segment sees all keys of the path, as these kernels align causal masks at the end.
    """

    kernel: Kernel
    path_tokens: Tensor  # int64 [keys]: the paths' tokens, end to end
    query_ends: Tensor  # int32 [segments + 1], cumulative
    key_ends: Tensor  # int32 [segments + 1], cumulative
    longest_query: int
    longest_path: int

    @classmethod
    def of(cls, tree: SegmentTree, kernel: Kernel) -> Self:
        return cls(
            kernel,
            path_tokens=torch.from_numpy(concatenated(tree.paths)),
            query_ends=_ends(tree.lengths),
            key_ends=_ends([len(path) for path in tree.paths]),
            longest_query=max(tree.lengths),
            longest_path=max(map(len, tree.paths)),
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # as BlockAttention
    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, scale: float | None = None) -> Tensor:
        return self.kernel(
            queries,
            keys.index_select(0, self.path_tokens),
            values.index_select(0, self.path_tokens),
            self.query_ends,
            self.key_ends,
            self.longest_query,
            self.longest_path,
            scale,
        )


def _ends(lengths: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32))


def _forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, tree: TreeAttention | None = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attend in transformers' models: over a tree if there is one, else as its `sdpa` does.

    Args:
        query: `[batch, heads, seq, head_dim]`, with a tree one row; key and value have `kv_heads`.
        tree: an argument of the model's call, which transformers passes on.

    Returns:
        `[batch, seq, heads, head_dim]`, and no attention weights.

    Raises:
        ValueError: with a tree, an option that would be ignored; names it.
    """
    if tree is None:
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **options
        )
    if ignored := [name for name, value in options.items() if value is not None and name not in HARMLESS]:
        raise ValueError(f"attention over a tree has no {', '.join(ignored)}")
    queries, keys, values = (states[0].transpose(0, 1) for states in (query, key, value))
    return tree(queries, keys, values, scaling)[None], None


AttentionInterface.register(NAME, _forward)
AttentionMaskInterface.register(NAME, sdpa_mask)  # for calls without a tree


def tree_obstacle(model: object) -> str | None:
    """Return the reason that a model's attention cannot be replaced; None if it can."""
    if not isinstance(model, PreTrainedModel):
        return None  # TransformerLM
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        return f"it has layers of kind {', '.join(sorted(kinds - {'full_attention'}))}"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return "its attention has a sliding window"
    if getattr(config, "attention_chunk_size", None):
        return "its attention is chunked"
    if getattr(config, "attn_logit_softcapping", None):
        return "its attention scores are capped"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        return f"its rotary positions ({rope['rope_type']}) depend on the longest sequence"
    if not (model._supports_attention_backend and model._can_set_attn_implementation()):
        return "its attention cannot be replaced"
    return None


def make_varlen(
    attention: Attention, dtype: str, device: torch.device
) -> tuple[str, Callable[[SegmentTree], TreeAttention]] | None:
    """Return a kernel's name and the maker of a packed row's attention by it; None to use `sdpa`.

    The kernels run on GPUs, in bfloat16. `auto` takes torch's own there.

    Raises:
        ValueError: the kernel's package is not installed.
    """
    has_kernels = device.type == "cuda" and dtype == "bfloat16"
    if attention == "sdpa" or not has_kernels:
        return None
    name = "varlen" if attention == "auto" else attention
    kernel = _torch_kernel if name == "varlen" else load_kernel(name)
    return name, partial(VarlenAttention.of, kernel=kernel)


def load_kernel(attention: str) -> Kernel:
    """Import a kernel of FlashAttention's own packages; raises ValueError if its package is not installed."""
    name = PACKAGES[attention]
    try:
        function = importlib.import_module(name).flash_attn_varlen_func
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"model.attention: {attention} needs the package {name}, which cannot be imported ({error}); "
            "install it, or use `auto`"
        ) from error

    def kernel(
        queries: Tensor, keys: Tensor, values: Tensor, query_ends: Tensor, key_ends: Tensor,
        longest_query: int, longest_path: int, scale: float | None,
    ) -> Tensor:  # fmt: skip
        mixed = function(
            queries, keys, values, cu_seqlens_q=query_ends, cu_seqlens_k=key_ends, max_seqlen_q=longest_query,
            max_seqlen_k=longest_path, softmax_scale=scale, causal=True,
        )  # fmt: skip
        output: Tensor = mixed[0] if isinstance(mixed, tuple) else mixed
        return output

    return kernel


@cache  # every layer of every pass asks
def _takes_gqa(function: Callable[..., object]) -> bool:
    """Return False for torch 2.11's, which takes fewer key heads than query heads without being told."""
    return "enable_gqa" in inspect.signature(function).parameters


def _torch_kernel(
    queries: Tensor, keys: Tensor, values: Tensor, query_ends: Tensor, key_ends: Tensor,
    longest_query: int, longest_path: int, scale: float | None,
) -> Tensor:  # fmt: skip
    from torch.nn.attention.varlen import varlen_attn  # imports CUDA's libraries

    options: dict[str, Any] = {}
    if _takes_gqa(varlen_attn):
        options["enable_gqa"] = queries.shape[1] != keys.shape[1]
    mixed = varlen_attn(
        queries, keys, values, query_ends, key_ends, longest_query, longest_path, scale=scale,
        window_size=(-1, 0), **options,
    )  # fmt: skip
    assert isinstance(mixed, Tensor)
    return mixed
