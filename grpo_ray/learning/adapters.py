"""LoRA adapters on a frozen base, through peft: made, merged tensor by tensor for the sampler, and their files.

peft puts its layers into the model in place, so that the policy keeps its class, its attention and its output
layer. A layer `q_proj` then has its own weights in `q_proj.base_layer`, and the adapter's beside it.
"""

import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from grpo_ray.config.model import AdapterConfig, ModelConfig
from grpo_ray.learning.hub_format import LazyWeight, persistent_buffers
from grpo_ray.learning.loading import cast_parameters, load_policy
from grpo_ray.learning.model_files import is_local
from grpo_ray.learning.policy_model import PolicyModel, with_head_dtype
from grpo_ray.learning.quantization import dequantized, is_quantized, quantize_linear_layers
from grpo_ray.learning.sharded import sharded_like
from grpo_ray.records.adapter_files import DIGEST, FIELDS, FILE, PREFIX, base_digest, checked_config

NAME = "default"  # peft's name of a model's only adapter
OWN = re.compile(r"\.lora_(A|B|magnitude_vector)\.")


def load_trained(path: str, config: ModelConfig, device: torch.device, seed: int = 0) -> PolicyModel:
    """Load the policy that is to be trained: in float32, or frozen in `model.dtype` under a float32 adapter.

    Args:
        path: the model's folder or hub name; with an adapter that of its base.
        seed: of a new adapter's random values.

    Raises:
        ValueError: the model, the adapter in `model.adapter.path`, or `model.head_dtype` cannot be used.
    """
    if config.adapter is None:
        model = load_policy(path, config.trust_remote_code, config.implementation).to(device)
        return with_head_dtype(model, config.head_dtype)
    dtype = getattr(torch, config.dtype)
    model = load_policy(path, config.trust_remote_code, config.implementation, dtype)
    if config.base_quantization != "none":
        quantize_linear_layers(model, dtype, device)
    torch.manual_seed(seed)
    add_adapter(model, config.adapter, path)
    return with_head_dtype(model.to(device), config.head_dtype)


def add_adapter(model: PolicyModel, config: AdapterConfig, base: str) -> None:
    """Freeze the model and put an adapter beside its linear layers, in float32: a new one, or `config.path`.

    Of a model without memory nothing is filled: it shows whether the adapter fits.

    Args:
        base: the model's folder or hub name, for the files of the adapter.

    Raises:
        ValueError: a target is not one of the model's linear layers, or `model.adapter.path` does not fit them.
    """
    from peft import LoraConfig, inject_adapter_in_model

    targets = _targets(model, config)
    name, _, revision = (base, "", "") if is_local(base) else base.partition("@")
    model.requires_grad_(False)
    names: Any = model
    names.is_loaded_in_4bit = any(map(is_quantized, model.parameters()))  # peft looks for it there
    lora = LoraConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules=targets, use_rslora=config.rslora,
        use_dora=config.dora, lora_dropout=0.0, bias="none", task_type="CAUSAL_LM",
        base_model_name_or_path=name, revision=revision or None,
    )  # fmt: skip
    inject_adapter_in_model(lora, model)
    del names.is_loaded_in_4bit
    cast_parameters((p for p in model.parameters() if p.requires_grad), torch.float32)
    if config.path is not None:
        load_adapter(model, Path(config.path))


def has_adapter(model: PolicyModel) -> bool:
    return hasattr(model, "peft_config")


TAKEN_FOR_EXPERTS = frozenset({"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
"""Linear layers, such as those of shared experts, for which peft 0.21 would adapt the experts' one weight."""


def _targets(model: PolicyModel, config: AdapterConfig) -> list[str]:
    """Return the names of the layers to adapt, checked against the model's."""
    output = model.get_output_embeddings()
    has_experts = any(weight.dim() == 3 and ".experts." in name for name, weight in model.named_parameters())
    layers = [
        name for name, layer in model.named_modules()
        if layer is not output and (type(layer) is nn.Linear or is_quantized(getattr(layer, "weight", None)))
        and not (has_experts and name.rpartition(".")[2] in TAKEN_FOR_EXPERTS)
        and not name.endswith((".dt_proj", ".classifier"))  # Jamba and Longcat use their weights alone
    ]  # fmt: skip
    known = sorted({name.rpartition(".")[2] for name in layers})
    for target in config.target_modules or ():
        if not any(f".{name}".endswith(f".{target}") for name in layers):
            raise ValueError(
                f"model.adapter.target_modules: the model has no linear layer {target!r} to adapt; it has "
                f"{', '.join(known) or 'none'}"
            )
    if not known:
        raise ValueError("model.adapter: the model has no linear layer that peft can adapt; remove the adapter")
    return list(config.target_modules or known)


@torch.no_grad()
def merged(layer: Any) -> torch.Tensor:
    """Return the sum of the base and the adapter's product, `[outputs, inputs]` float32.

    Args:
        layer: a linear one with an adapter, or in 4 bits, or both.
    """
    base = dequantized(getattr(layer, "base_layer", layer).weight)
    weight = base.float()
    if not hasattr(layer, "base_layer"):
        return weight
    narrow, wide = (getattr(layer, name)[NAME].weight.float() for name in ("lora_A", "lora_B"))
    weight = torch.addmm(weight, wide, narrow, alpha=layer.scaling[NAME])
    if NAME in layer.lora_magnitude_vector:  # DoRA: rows of a trained length
        lengths = layer.lora_magnitude_vector[NAME].weight.to(base.dtype)
        weight *= (lengths / weight.to(base.dtype).norm(dim=1))[:, None]  # rounded as in PEFT's layer
    return weight


def served_weights(model: PolicyModel) -> Iterator[tuple[str, torch.Tensor | LazyWeight]]:
    """Yield the weights that the sampler loads, without an adapter's names; see also `in_hub_format`."""
    for name, parameter in model.named_parameters():
        if OWN.search(name):
            continue
        served, (path, _, kind) = name.replace(".base_layer.", "."), name.rpartition(".")
        if kind == "weight" and (served != name or is_quantized(parameter)):
            layer: Any = model.get_submodule(path.removesuffix(".base_layer"))
            shape = torch.Size((layer.out_features, layer.in_features))
            yield served, LazyWeight(shape, torch.float32, partial(merged, layer), layer)
        else:
            yield served, parameter
    for name, buffer in persistent_buffers(model):
        # Nothing trains it, and a router's correction is in float32.
        exact = LazyWeight(buffer.shape, buffer.dtype, buffer.detach, keeps_dtype=True)
        yield name.replace(".base_layer.", "."), exact


def served_adapter(model: PolicyModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the adapter's values under the names in PEFT's files, for an engine that merges nothing."""
    for name, parameter in trained_parameters(model):
        yield PREFIX + name.replace(f".{NAME}.", "."), parameter


def trained_parameters(model: PolicyModel) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


def save_adapter(model: Any, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write the adapter in PEFT's format; `weights` are its parameters by their names in the model.

    Raises:
        OSError, SafetensorError: a file could not be written.
    """
    from peft import get_peft_model_state_dict

    config = model.peft_config[NAME]
    config.save_pretrained(str(folder))
    tensors = get_peft_model_state_dict(model, dict(weights), save_embedding_layers=False)
    metadata = {"format": "pt"}
    if digest := base_digest(_base(config)):
        metadata[DIGEST] = digest
    save_file({PREFIX + name: tensor for name, tensor in tensors.items()}, folder / FILE, metadata=metadata)


def load_adapter(model: Any, folder: Path) -> None:
    """Load the values of a saved adapter into the model's.

    Raises:
        ValueError: it is not an adapter for this model with this configuration; says why.
    """
    from peft import get_peft_model_state_dict

    config = model.peft_config[NAME]
    saved = checked_config(folder, _base(config))
    for name, field in FIELDS.items():
        if saved.get(name, False) != getattr(config, name):
            raise ValueError(
                f"model.adapter.{field}: the adapter in {str(folder)!r} has {saved.get(name)}, and the "
                f"configuration {getattr(config, name)}; give model.adapter the values that it was trained with"
            )
    found = {name.removeprefix(PREFIX): tensor.float() for name, tensor in load_file(folder / FILE).items()}
    expected = get_peft_model_state_dict(model, save_embedding_layers=False)
    wrong = sorted(
        name for name in found.keys() | expected.keys()
        if name not in found or name not in expected or found[name].shape != expected[name].shape
    )  # fmt: skip
    if wrong:
        raise ValueError(
            f"model.adapter.path: {str(folder)!r} is the adapter of another base, or of other layers: "
            f"{wrong[0]} is missing, unknown or of another shape ({len(wrong)} such tensors). Check model.path "
            "and model.adapter.target_modules"
        )
    if not all(torch.isfinite(tensor).all() for tensor in found.values()):
        raise ValueError(
            f"model.adapter.path: values in {str(folder)!r} are NaN or infinite; use an earlier one"
        )
    if not next(iter(expected.values())).is_meta:
        with torch.no_grad():
            for name, own in expected.items():
                own.copy_(sharded_like(found[name], own))


def _base(config: Any) -> str:
    """Return the folder of the base, its hub name, or `owner/name@revision`."""
    return "@".join(filter(None, (config.base_model_name_or_path, config.revision)))
