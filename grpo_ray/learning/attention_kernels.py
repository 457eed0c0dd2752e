"""Kernels of FlashAttention for segments of any length, by the name in `model.attention`."""

import importlib
import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from grpo_ray.config.model import Attention
from grpo_ray.learning.attention import Kernel, VarlenAttention
from grpo_ray.learning.families import SegmentTree
from grpo_ray.learning.policy_model import TreeAttention

PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
"""The module with each kernel that torch does not bring along."""


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
    """Import a kernel of FlashAttention's own packages.

    Raises:
        ValueError: its package is not installed.
    """
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
