"""A tiny model with its own tokenizer, for machines without a model hub."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from grpo_ray.config import Config
from grpo_ray.config.model import Implementation, TinyModelConfig
from grpo_ray.config.task import SortingTaskConfig
from grpo_ray.models.plain_chat import RESPONSE_TEMPLATE, TEMPLATE
from grpo_ray.models.policy_model import PolicyModel
from grpo_ray.models.tiny_tokenizer import prompt_template, rendered, tiny_tokenizer
from grpo_ray.models.transformer_lm import TransformerLM
from grpo_ray.models.warmup import warm_up
from grpo_ray.rewards.answer_formats import ENDINGS, answer_place
from grpo_ray.tasks.examples import Pairs
from grpo_ray.tasks.warmup import tokenizer_pairs, warmup_pairs

_RECIPE = 1  # increase when the code below would build a different model from the same configuration


def cache_folder() -> Path:
    """Return the folder of built models: $GRPO_RAY_CACHE, or grpo_ray/ in the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "grpo_ray"
    return Path(os.environ.get("GRPO_RAY_CACHE", default))


def build_model(
    config: TinyModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    implementation: Implementation = "transformers",
) -> PolicyModel:
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


def _warmup_pairs(config: Config) -> Pairs:
    """Return the (prompt, response) pairs that the warm-up trains on; none without a warm-up."""
    assert config.model.tiny is not None
    warmup = config.model.tiny.warmup
    if warmup is None:
        return []
    num_pairs = warmup.num_steps * warmup.batch_size
    return rendered(config, warmup_pairs(config.task, config.run.seed, num_pairs))


def tiny_model_folder(config: Config, progress: Callable[[int, int, float], None] | None = None) -> Path:
    """Build and warm up the configured tiny model, or find it in the cache; return its folder.

    Args:
        progress: called with (step, num_steps, loss in nats per token) during the warm-up.
    """
    assert config.model.tiny is not None
    digest = hashlib.sha256(json.dumps(_recipe(config), sort_keys=True).encode()).hexdigest()[:16]
    folder = cache_folder() / f"tiny-{digest}"
    if folder.exists():
        return folder

    tiny = config.model.tiny
    tokenizer = tiny_tokenizer(config)
    model = build_model(tiny, tokenizer, config.run.seed, config.model.implementation)
    if tiny.warmup is not None:
        warm_up(model, tokenizer, _warmup_pairs(config), tiny.warmup, progress)

    # Written under another name first, so that a half-written model is never found in the cache.
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix="unfinished-", dir=folder.parent))
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    try:
        unfinished.rename(folder)
    except OSError:  # another run built the same model first
        shutil.rmtree(unfinished)
    return folder


def _recipe(config: Config) -> list[Any]:
    """Return everything that determines the built model."""
    tiny, task, seed = config.model.tiny, config.task, config.run.seed
    assert tiny is not None
    recipe: list[Any] = [_RECIPE, config.model.implementation, tiny.model_dump(), seed]
    if config.episode_tasks:
        recipe += [TEMPLATE, RESPONSE_TEMPLATE]
    if isinstance(task, SortingTaskConfig):  # what its pairs are generated from
        numbers = task.model_dump(include={"kind", "num_digits", "num_train_prompts", "num_validation_prompts"})
        ending = ENDINGS[answer_place(task.reward)]
        return [*recipe, numbers, prompt_template(config).text, ending]
    # The pairs themselves, since a file may hold them.
    return [*recipe, rendered(config, tokenizer_pairs(task, seed)), _warmup_pairs(config)]
