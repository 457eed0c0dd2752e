"""Reading folders in Llama's Hugging Face layout as TransformerLM."""

from collections.abc import Sequence

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig

from grpo_ray.learning.model_files import savable, text_config
from grpo_ray.learning.transformer_lm.model import TransformerLM


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


def transformer_lm_of(
    config: LlamaConfig, loaded: LlamaForCausalLM, unexpected: Sequence[str], path: str
) -> TransformerLM:
    """Return the model with the weights of transformers' own, which was `loaded` from the folder or hub name.

    Raises:
        ValueError: there are tensors that a plain Llama does not have.
    """
    if unexpected:
        raise ValueError(
            f"model.implementation: grpo_ray computes plain Llama models only; {path!r} has the tensors "
            f"{', '.join(unexpected[:3])}{' and more' if len(unexpected) > 3 else ''}; set it to transformers"
        )
    with torch.device("meta"):  # initial values would be discarded
        model = TransformerLM(config)
    model.generation_config = savable(loaded.generation_config)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    return model
