"""A frozen base in 4 bits: the linear layers under an adapter, in bitsandbytes' NF4.

NF4 has 16 values at the quantiles of a normal distribution, and a scale per 64 weights that is itself quantized
(Dettmers et al. 2023, QLoRA, section 3). bitsandbytes is chosen over torchao because peft's layers for it
compute on GPUs and CPUs alike, without compilation.
"""

from typing import Any

import torch
from torch import nn

from grpo_ray.learning.policy_model import PolicyModel

BLOCK = 64  # weights that share a scale


def quantize_linear_layers(model: PolicyModel, dtype: torch.dtype, device: torch.device) -> None:
    """Replace the linear layers but the output layer by ones in 4 bits, one at a time, on the device.

    They dequantize to `dtype`, and multiply in it. A layer stays as it is if its rows are not whole blocks: on
    CPUs bitsandbytes 0.50 dequantizes those with the scales of their neighbours.
    """
    from bitsandbytes.nn import Params4bit

    output = model.get_output_embeddings()
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and layer is not output and layer.in_features % BLOCK == 0:
            narrow = _without_weights(layer, dtype)
            narrow.weight = Params4bit(layer.weight.data.to(dtype), quant_type="nf4", module=narrow).to(device)
            model.set_submodule(name, narrow)


def _without_weights(layer: nn.Linear, dtype: torch.dtype) -> Any:
    from bitsandbytes.nn import Linear4bit

    with torch.device("meta"):  # its own weights would be discarded
        narrow: Any = Linear4bit(
            layer.in_features, layer.out_features, layer.bias is not None, compute_dtype=dtype, quant_type="nf4"
        )
    narrow.bias = layer.bias
    narrow.support_avx512bf16_for_cpu = False  # or a forward pass would repack the weights for inference alone
    return narrow.eval()


def quantized_values(layer: Any) -> dict[str, torch.Tensor]:
    """Return the weights of a layer in 4 bits, and their scales, as plain tensors."""
    return {"data": layer.weight.data, **layer.weight.quant_state.as_dict(packed=True)}


def layer_of(
    values: dict[str, torch.Tensor], layer: nn.Linear, dtype: torch.dtype, device: torch.device
) -> Any:
    """Return `layer` in 4 bits with the weights that `quantized_values` returned; its bias stays."""
    from bitsandbytes.nn import Params4bit

    narrow, scales = _without_weights(layer, dtype), dict(values)
    narrow.weight = Params4bit.from_prequantized(scales.pop("data"), scales, device=device, module=narrow)
    return narrow


def is_quantized(weight: object) -> bool:
    return getattr(weight, "quant_state", None) is not None


def dequantized(weight: Any) -> torch.Tensor:
    """Return the weights that the layer's products are computed with; others than 4-bit ones as they are."""
    if not is_quantized(weight):
        return weight.detach()  # type: ignore[no-any-return]
    from bitsandbytes.functional import dequantize_4bit

    values: torch.Tensor = dequantize_4bit(weight.data, weight.quant_state)
    return values
