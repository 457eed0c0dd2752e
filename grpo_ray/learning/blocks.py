"""Options of a policy's blocks: compilation, and what the backward pass recomputes."""

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from grpo_ray.config.learner import Recomputation
from grpo_ray.learning.policy_model import PolicyModel

MATRIX_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}


def recompute_in_backward(model: PolicyModel, which: Recomputation) -> None:
    """Have the backward pass recompute the blocks' activations from their inputs, in `full` or the cheap part.

    `selective` keeps the outputs of matrix products and attention, and recomputes norms, rotations and
    activation functions (Korthikanti et al. 2022, Reducing Activation Recomputation, section 5, for the idea).
    """
    if which == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if which == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_or_recompute)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    for module in model.modules():  # transformers checkpoints in training mode only; dropout inside stays off
        module.training = getattr(module, "gradient_checkpointing", False)


def _keep_or_recompute(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    # Each kernel of attention is an operation of its own: aten's, flash_attn's, and those registered here.
    is_kept = operation in MATRIX_PRODUCTS or "attention" in str(operation) or "attn" in str(operation)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def compile_blocks(model: PolicyModel) -> None:
    """Compile each block in place, for any batch and sequence length; names of parameters stay."""
    for block in model.model.layers:
        block.compile(dynamic=True)
