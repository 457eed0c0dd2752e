"""Reading folders in Llama's Hugging Face layout as TransformerLM."""

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, PreTrainedConfig

from grpo_ray.learning.model_files import savable, text_config
from grpo_ray.learning.transformer_lm.model import OUTPUT_LAYER, TransformerLM


def check_llama(path: str) -> LlamaConfig:
    """Return the model's configuration if it is that of a Llama which TransformerLM computes exactly.

    Raises:
        ValueError: names every unsupported property.
    """
    config = text_config(path)
    if unsupported := _unsupported(config):
        raise ValueError(
            f"model.implementation: grpo_ray computes plain Llama models only; {path!r} has "
            f"{', '.join(unsupported)}; set it to transformers"
        )
    return config


def _unsupported(config: PreTrainedConfig) -> list[str]:
    if config.model_type != "llama":
        return [f"model_type {config.model_type!r}"]
    rope = config.rope_parameters
    found = {
        f"rope_type {rope['rope_type']!r}": rope["rope_type"] != "default",
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0) != 1.0,
        "biases (attention_bias)": config.attention_bias,
        "biases (mlp_bias)": config.mlp_bias,
        f"hidden_act {config.hidden_act!r}": config.hidden_act not in ("silu", "swish"),
        "quantized weights (quantization_config)": getattr(config, "quantization_config", None) is not None,
        f"{config.num_attention_heads} heads for {config.num_key_value_heads} key and value heads": (
            config.num_attention_heads % config.num_key_value_heads
        ),
    }
    return [name for name, is_present in found.items() if is_present]


def load_transformer_lm(
    config: LlamaConfig, folder: Path, files: Iterable[Path]
) -> tuple[TransformerLM, list[str]]:
    """Load the model from the folder's `files` of weights, in float32.

    Also return the names of parameters that are missing or have another shape.

    Raises:
        ValueError: there are tensors that a plain Llama does not have.
    """
    with torch.device("meta"):  # initial values would be discarded
        model = TransformerLM(config)
    if (folder / "generation_config.json").exists():
        model.generation_config = savable(GenerationConfig.from_pretrained(folder))
    expected = {name: parameter.shape for name, parameter in model.named_parameters()}
    found = {name: tensor for name, tensor in _tensors(files) if not _is_redundant(name, config)}
    if unexpected := sorted(found.keys() - expected.keys()):
        raise ValueError(
            f"model.implementation: grpo_ray computes plain Llama models only; {str(folder)!r} has the tensors "
            f"{', '.join(unexpected[:3])}{' and more' if len(unexpected) > 3 else ''}; set it to transformers"
        )
    wrong = sorted(name for name, shape in expected.items() if name not in found or found[name].shape != shape)
    if not wrong:
        model.load_state_dict(found, strict=False, assign=True)
        model.tie_weights()
    return model, wrong


def _tensors(files: Iterable[Path]) -> Iterable[tuple[str, Tensor]]:
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name).float()


def _is_redundant(name: str, config: LlamaConfig) -> bool:
    """Recognise a second copy of tied weights, and the rotary frequencies of early Llama checkpoints."""
    return name.endswith("rotary_emb.inv_freq") or (name == OUTPUT_LAYER and config.tie_word_embeddings)
