"""A tiny model's folder: built from the configuration, warmed up on the task's own pairs, and cached."""

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from grpo_ray.cluster import local
from grpo_ray.config import Config, LearnerConfig
from grpo_ray.config.model import Implementation, TinyModelConfig
from grpo_ray.config.task import SortingTaskConfig
from grpo_ray.learning.model_files import load_tokenizer
from grpo_ray.learning.plain_chat import RESPONSE_TEMPLATE, TEMPLATE
from grpo_ray.learning.tiny_tokenizer import prompt_template, rendered, tiny_tokenizer
from grpo_ray.records.durable import sync_tree
from grpo_ray.rewards.answer_formats import ENDINGS, answer_place
from grpo_ray.run.supervised import Progress, imitate, imitating, write_weights
from grpo_ray.tasks.demonstrations import plain_demonstration
from grpo_ray.tasks.examples import Pairs
from grpo_ray.tasks.kinds import tokenizer_pairs, warmup_pairs
from grpo_ray.types import StartingModel

if TYPE_CHECKING:
    from grpo_ray.learning.policy_model import PolicyModel

_RECIPE = 2  # increase when the code below would build a different model from the same configuration


def cache_folder() -> Path:
    """Return the folder of built models: $GRPO_RAY_CACHE, or grpo_ray/ in the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "grpo_ray")
    return Path(os.environ.get("GRPO_RAY_CACHE") or default).expanduser().absolute()


def build_model(
    config: TinyModelConfig, tokenizer: PreTrainedTokenizerBase, seed: int,
    implementation: Implementation = "transformers",
) -> "PolicyModel":  # fmt: skip
    """Build a randomly initialised float32 model; the same seed gives the same weights."""
    import torch  # takes seconds, which a model in the cache does not need
    from transformers import LlamaConfig, Qwen2Config, Qwen2ForCausalLM

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
        from grpo_ray.learning.transformer_lm import TransformerLM

        return TransformerLM(LlamaConfig(**shape))
    model: PolicyModel = Qwen2ForCausalLM(Qwen2Config(**shape))
    return model


def tiny_skeleton(config: Config, tokenizer: PreTrainedTokenizerBase) -> "PolicyModel":
    """Return the configured tiny model without memory for its weights."""
    import torch

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


def tiny_model_folder(config: Config, progress: Progress | None = None) -> Path:
    """Build and warm up the configured tiny model, or find it in the cache; return its folder.

    Args:
        progress: called with (step, num_steps, loss in nats per token) during the warm-up.
    """
    assert config.model.tiny is not None
    folder = cache_folder() / f"tiny-{tiny_digest(config)}"
    if folder.exists():
        return folder

    tokenizer = tiny_tokenizer(config)
    model = build_model(config.model.tiny, tokenizer, config.run.seed, config.model.implementation)
    # Written under another name first, so that a half-written model is never found in the cache.
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=folder.parent) as beside:
        unfinished = Path(beside, "model")
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        if config.model.tiny.warmup is not None:
            _warm_up(config, unfinished, progress)
        sync_tree(unfinished)  # or a power cut would leave a damaged model in the cache
        with contextlib.suppress(OSError):  # another run built the same model first
            unfinished.rename(folder)
    return folder


def _warm_up(config: Config, folder: Path, progress: Progress | None) -> None:
    """Train the model in the folder on the task's pairs, in float32 on the CPU of this process."""
    assert config.model.tiny is not None
    warmup = config.model.tiny.warmup
    assert warmup is not None
    plain = {"dtype": "float32", "adapter": None, "base_quantization": "none", "attention": "auto"}
    own = {"model": config.model.model_copy(update=plain), "learner": LearnerConfig(num_gpus=0)}
    imitator = imitating(
        config.model_copy(update=own), warmup.num_steps, warmup.batch_size, num_threads=warmup.num_threads,
        learning_rate=warmup.learning_rate, betas=(0.9, 0.98), weight_decay=0.01,
    )  # fmt: skip
    tokenizer = load_tokenizer(str(folder))
    pairs = [plain_demonstration(tokenizer, *pair) for pair in _warmup_pairs(config)]
    with local.learning(imitator, StartingModel(str(folder), (), 0), folder) as learner:
        imitate(learner, pairs, imitator, progress)
        write_weights(learner, folder)


def tiny_digest(config: Config) -> str:
    """Return a digest of everything that determines the built model."""
    tiny, task, seed = config.model.tiny, config.task, config.run.seed
    assert tiny is not None
    recipe: list[Any] = [_RECIPE, config.model.implementation, tiny.model_dump(), seed]
    if config.episode_tasks:
        recipe += [TEMPLATE, RESPONSE_TEMPLATE, "the end token's embedding learns from contexts"]
    if isinstance(task, SortingTaskConfig):  # what its pairs are generated from
        numbers = task.model_dump(include={"kind", "num_digits", "num_train_prompts", "num_validation_prompts"})
        ending = ENDINGS[answer_place(task.reward)]
        recipe += [numbers, prompt_template(config).text, ending]
    else:  # the pairs themselves, since a file may hold them
        recipe += [rendered(config, tokenizer_pairs(task, seed)), _warmup_pairs(config)]
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]
