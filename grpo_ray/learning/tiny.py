"""A tiny model with its own tokenizer, for machines without a model hub."""

import os
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from grpo_ray.config import Config
from grpo_ray.config.model import Implementation, TinyModelConfig
from grpo_ray.learning.policy_model import PolicyModel
from grpo_ray.learning.transformer_lm import TransformerLM


def cache_folder() -> Path:
    """Return the folder of built models: $GRPO_RAY_CACHE, or grpo_ray/ in the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "grpo_ray"
    return Path(os.environ.get("GRPO_RAY_CACHE", default))


def build_model(
    config: TinyModelConfig, tokenizer: PreTrainedTokenizerBase, seed: int,
    implementation: Implementation = "transformers",
) -> PolicyModel:  # fmt: skip
    """Build a randomly initialised float32 model; the same seed gives the same weights."""
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": max(config.vocab_size, len(tokenizer)),
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.initializer_range,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }
    if implementation == "grpo_ray":
        return TransformerLM(LlamaConfig(**shape))
    model: PolicyModel = Qwen2ForCausalLM(Qwen2Config(**shape))
    return model


def tiny_skeleton(config: Config, tokenizer: PreTrainedTokenizerBase) -> PolicyModel:
    """Return the configured tiny model without memory for its weights."""
    assert config.model.tiny is not None
    with torch.device("meta"):
        return build_model(config.model.tiny, tokenizer, config.run.seed, config.model.implementation)
