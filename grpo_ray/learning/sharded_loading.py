"""Loading a policy onto several ranks, of which the first alone ever has it whole."""

from typing import Any

import torch
import torch.distributed as dist

from grpo_ray.config.model import ModelConfig
from grpo_ray.learning.adapters import add_adapter, load_trained
from grpo_ray.learning.hub_format import choose_conversions, used_conversions
from grpo_ray.learning.loading import cast_parameters, skeleton
from grpo_ray.learning.policy_model import PolicyModel, with_head_dtype
from grpo_ray.learning.quantization import is_quantized, layer_of, quantized_values
from grpo_ray.learning.ranks import Ranks
from grpo_ray.learning.sharded import sharded_like


def load_in_shards(
    path: str, config: ModelConfig, device: torch.device, ranks: Ranks, seed: int = 0,
    kept_dtype: torch.dtype | None = None,
) -> PolicyModel:  # fmt: skip
    """Load like `load_trained`, but only this rank's part of the weights.

    The first rank reads the model into host memory, and sends it tensor by tensor.

    Args:
        kept_dtype: of weights that are not trained; default: as they are trained, in float32.

    Raises:
        ValueError: the model, or the adapter in `model.adapter.path`, cannot be used.
    """
    is_quantizing = config.base_quantization != "none"
    complete = None
    if ranks.is_first:
        complete = load_trained(path, config, device if is_quantizing else torch.device("cpu"), seed)
    ranks.wait_for_first()
    model = skeleton(path, config.trust_remote_code, config.implementation).eval()
    if config.adapter is not None:
        cast_parameters(model.parameters(), getattr(torch, config.dtype))
        if is_quantizing:
            _receive_quantized_layers(model, complete, ranks, getattr(torch, config.dtype), device)
        # Without values: the first rank has them.
        add_adapter(model, config.adapter.model_copy(update={"path": None}), path)
    with_head_dtype(model, config.head_dtype)
    if kept_dtype is not None:
        cast_parameters(model.parameters(), kept_dtype)
    # Known from its files: the names that the weights have there. Sharding changes the model's class.
    choose_conversions(model, ranks.from_first(used_conversions(complete) if complete is not None else None))
    ranks.shard(model, getattr(torch, config.dtype))
    module: Any = model
    module._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    _receive_values(module, complete, ranks)
    return model


def _receive_quantized_layers(
    model: PolicyModel, complete: PolicyModel | None, ranks: Ranks, dtype: torch.dtype, device: torch.device
) -> None:
    """Put the first rank's layers in 4 bits in the place of the model's own."""
    layers = dict(complete.named_modules()) if complete is not None else {}
    names = [name for name, layer in layers.items() if is_quantized(getattr(layer, "weight", None))]
    for name in ranks.from_first(names):
        values = ranks.tensors_from_first(quantized_values(layers[name]) if layers else {})
        place = name.removesuffix(".base_layer")
        own: Any = model.get_submodule(place)
        model.set_submodule(place, layer_of(values, own, dtype, device))


@torch.no_grad()
def _receive_values(model: Any, complete: Any, ranks: Ranks) -> None:
    """Fill the sharded parameters and the buffers with the first rank's values.

    Raises:
        ValueError: the two do not have the same tensors.
    """
    sources = dict(complete.named_parameters()) | dict(complete.named_buffers()) if complete is not None else {}
    targets = dict(model.named_parameters()) | dict(model.named_buffers())
    if others := {*ranks.from_first(sorted(sources))} ^ {*targets}:
        raise ValueError(
            f"the model's files and its config.json differ in the weights {', '.join(sorted(others)[:4])}; "
            "correct config.json, such as tie_word_embeddings"
        )
    for name, target in targets.items():
        if is_quantized(target):
            continue
        values = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        if ranks.is_first:
            values.copy_(sources[name])
        dist.broadcast(values, 0)
        target.copy_(sharded_like(values, target))
