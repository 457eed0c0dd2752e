"""A policy: its interface, which transformers' causal models and TransformerLM implement, and its options.

Its options: compilation of its blocks, what the backward pass recomputes, and a float32 output layer.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from grpo_ray.config.learner import Recomputation
from grpo_ray.config.model import HeadDtype


class TreeAttention(Protocol):
    """Attention in a row of segments."""

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, scale: float | None = None) -> Tensor:
        """Attend along each token's path.

        Args:
            queries: `[tokens, heads, head_dim]`.
            keys, values: `[tokens, kv_heads, head_dim]`; `heads / kv_heads` query heads share one.
            scale: factor of the scores; default: `head_dim ** -0.5`.

        Returns:
            `[tokens, heads, head_dim]`.
        """
        ...


MATRIX_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}


class PolicyModel(nn.Module):
    """A torch module over token ids; its parameters have the names used in its Hugging Face folder.

    transformers' causal models have this interface without inheriting it.
    """

    base_model: Callable[..., Any]
    """All but the output layer, called with the same arguments; with `tree`, over a packed row."""
    model: Any  # everything before the output layer; its blocks are in `layers`
    get_output_embeddings: Callable[[], nn.Linear]
    gradient_checkpointing_enable: Callable[..., None]
    """Pass each block through `torch.utils.checkpoint.checkpoint` with `gradient_checkpointing_kwargs`."""
    save_pretrained: Callable[..., None]
    """Write a folder in Hugging Face format; `state_dict` replaces the model's own weights."""

    @property
    def device(self) -> torch.device:
        return self.get_output_embeddings().weight.device


class Float32Head(nn.Linear):
    """A linear layer with a product in float32; its weights and their gradients keep their dtype."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input.float(), self.weight.float(), None if self.bias is None else self.bias.float())


def with_head_dtype(model: PolicyModel, head_dtype: HeadDtype) -> PolicyModel:
    """Return the model, with its output layer changed in place to compute in `head_dtype`.

    Raises:
        ValueError: the output layer is none that can be computed in float32.
    """
    layer = model.get_output_embeddings()
    if head_dtype == "float32":
        if type(layer) not in (nn.Linear, Float32Head):  # which it may be already
            raise ValueError(
                f"model.head_dtype: the output layer of {type(model).__name__} is a {type(layer).__name__}, "
                "but only a linear layer can be computed in float32; set it to model"
            )
        layer.__class__ = Float32Head  # not a new layer: it may share its weights with the embeddings
    return model


def recompute_in_backward(model: PolicyModel, which: Recomputation) -> None:
    """Have the backward pass recompute the blocks' activations from their inputs, in `full` or the cheap part.

    `selective` keeps the outputs of matrix products and attention, and recomputes norms, rotations and
    activation functions (Korthikanti et al. 2022, Reducing Activation Recomputation, section 5, for the idea).
    """
    if which == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if which == "selective":
        if getattr(getattr(model, "config", None), "clip_qkv", None):
            raise ValueError(
                "learner.gradient_checkpointing: the model clips kept queries and keys in place (clip_qkv), "
                "and `selective` would give another gradient; use full or none"
            )
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_or_recompute)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    # transformers checkpoints in training mode only, in which some models drop values without a module for it.
    for module in model.modules():
        for owner in (module, getattr(module, "config", None)):  # from which Falcon reads the rates
            for name, rate in [*getattr(owner, "__dict__", {}).items()]:
                if "drop" in name and isinstance(rate, float):
                    setattr(owner, name, 0.0)
        module.training = getattr(module, "gradient_checkpointing", False)


def _keep_or_recompute(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    # Each kernel of attention is an operation of its own: aten's, flash_attn's, and those registered here.
    is_kept = operation in MATRIX_PRODUCTS or "attention" in str(operation) or "attn" in str(operation)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def blocks_of(model: PolicyModel) -> Iterable[nn.Module]:
    """Return the blocks: `model.layers`, or in models of another layout, such as GPT-2, their longest list."""
    layers: Iterable[nn.Module] | None = getattr(getattr(model, "model", None), "layers", None)
    return layers or max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)


def compile_blocks(model: PolicyModel) -> None:
    """Compile blocks and output layer in place, for any batch and sequence length; names of parameters stay."""
    for module in (*blocks_of(model), model.get_output_embeddings()):
        module.compile(dynamic=True)
