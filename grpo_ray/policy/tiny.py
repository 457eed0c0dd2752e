"""A tiny Qwen2-architecture model with a tokenizer of its own, for machines without a model hub."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)

from grpo_ray.config import Config
from grpo_ray.config_model import TinyModelConfig
from grpo_ray.policy.warmup import warm_up
from grpo_ray.tasks.prompts import load_template, render
from grpo_ray.tasks.sorting import ENDINGS, TAGGED, warmup_pairs

END_TOKEN = "<|endoftext|>"
_RECIPE = 1  # raise it when the code below would build another model from the same configuration


def cache_folder() -> Path:
    """Where built models are kept: $GRPO_RAY_CACHE, or grpo_ray/ in the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "grpo_ray"
    return Path(os.environ.get("GRPO_RAY_CACHE", default))


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """A byte-level BPE of `vocab_size` tokens at most, learned from `texts`.

    transformers builds a Qwen2Tokenizer for any Qwen2 config, whatever was saved beside it, so the merges
    are learned through that class's own backend: AutoTokenizer and vLLM then agree on every string.
    """
    learner = Qwen2Tokenizer()
    trained = learner.train_new_from_iterator(texts, vocab_size, show_progress=False)
    model = json.loads(trained.backend_tokenizer.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    return Qwen2Tokenizer(
        vocab=model["vocab"], merges=merges, eos_token=END_TOKEN, pad_token=END_TOKEN, unk_token=END_TOKEN
    )


def build_model(config: TinyModelConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    """A randomly initialised float32 model; the same seed gives the same weights."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=max(config.vocab_size, len(tokenizer)),
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            intermediate_size=config.intermediate_size,
            max_position_embeddings=config.max_position_embeddings,
            tie_word_embeddings=config.tie_embeddings,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            dtype="float32",
        )
    )


def tiny_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """The tokenizer of the configured tiny model, learned from the task's own text."""
    assert config.model.tiny is not None
    assert config.task.kind == "sorting"
    taken = config.task.num_train_prompts + config.task.num_validation_prompts
    num_pairs = min(1000, 10**config.task.num_digits - taken)  # few digits make few numbers
    if num_pairs < 1:
        raise ValueError(
            f"task.num_train_prompts, task.num_validation_prompts: {taken} prompts leave no number of "
            f"task.num_digits = {config.task.num_digits} for the tokenizer"
        )
    texts = (prompt + response for prompt, response in _rendered_pairs(config, num_pairs))
    return train_tokenizer(texts, config.model.tiny.vocab_size)


def _rendered_pairs(config: Config, num_pairs: int) -> list[tuple[str, str]]:
    assert config.task.kind == "sorting"  # check_files has seen to it
    template = load_template(config.task.prompt)
    pairs = warmup_pairs(config.task, config.run.seed, num_pairs)
    return [(render(template, question), response) for question, response in pairs]


def tiny_model_folder(config: Config, progress: Callable[[int, int, float], None] | None = None) -> Path:
    """Build and warm up the configured tiny model, or find it in the cache; returns its folder.

    Args:
        progress: called with (step, num_steps, loss in nats a token) while the warm-up runs.
    """
    assert config.model.tiny is not None
    task = config.task.model_dump(exclude={"reward", "prompt"})
    template = load_template(config.task.prompt)
    ending = ENDINGS.get(str(config.task.reward), TAGGED)
    recipe = [_RECIPE, config.model.tiny.model_dump(), task, template, ending, config.run.seed]
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]
    folder = cache_folder() / f"tiny-{digest}"
    if folder.exists():
        return folder

    tiny = config.model.tiny
    tokenizer = tiny_tokenizer(config)
    model = build_model(tiny, tokenizer, config.run.seed)
    if tiny.warmup is not None:
        pairs = _rendered_pairs(config, tiny.warmup.num_steps * tiny.warmup.batch_size)
        warm_up(model, tokenizer, pairs, tiny.warmup, progress)

    # Written beside its final name and renamed: a half-written model is never taken from the cache.
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix="unfinished-", dir=folder.parent))
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    try:
        unfinished.rename(folder)
    except OSError:  # another run built the same model first
        shutil.rmtree(unfinished)
    return folder
