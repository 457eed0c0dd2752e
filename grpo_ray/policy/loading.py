"""Loading a policy and its tokenizer, and the facts about them that others need."""

from pathlib import Path

import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)


def is_local(path: str) -> bool:
    """Whether `model.path` names a folder here rather than a model on a hub (`owner/name`)."""
    return path.startswith(("/", "./", "../")) or Path(path).exists() or path.count("/") != 1


def check_local_model(path: str) -> None:
    """Refuse a local folder that holds no model, before anything is started.

    Raises:
        ValueError: the folder is missing or has no config.json or no weights.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"model.path: no folder {path!r}; give a folder in Hugging Face format or a hub name")
    if not (folder / "config.json").exists():
        raise ValueError(f"model.path: {path!r} has no config.json; it is not a model in Hugging Face format")
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"model.path: {path!r} has no *.safetensors; save it with save_pretrained()")


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)


def load_policy(path: str, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model with float32 master weights, in evaluation mode (no dropout: the sampler has none)."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, trust_remote_code=trust_remote_code, attn_implementation="sdpa"
    )
    return model.eval()


def max_positions(path: str, trust_remote_code: bool = False) -> int | None:
    """Longest sequence the model was made for, in tokens; None where its config does not say."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def end_token_ids(path: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that ends a response: the tokenizer's, and those of the model's generation config."""
    try:
        listed = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # a model without generation_config.json
        listed = None
    ids = {listed} if isinstance(listed, int) else set(listed or ())
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return tuple(sorted(ids))


def check_lengths(longest_prompt: int, max_tokens: int, limit: int | None, what: str) -> None:
    """Refuse prompts and responses that do not fit `limit` tokens (None: no limit known).

    Raises:
        ValueError: the longest prompt and response together are longer.
    """
    if limit is not None and longest_prompt + max_tokens > limit:
        raise ValueError(
            f"sampling.max_tokens: {max_tokens} response tokens after the longest prompt "
            f"({longest_prompt} tokens) do not fit {what} ({limit}); "
            f"set it to {max(0, limit - longest_prompt)} or less"
        )


def check_hub_model(name: str) -> None:
    """Ask the hub once whether it has the model, unless it is in the local cache.

    Raises:
        ValueError: it is not there, or the hub cannot be reached.
    """
    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    try:
        HfApi().model_info(name, timeout=10)
    except Exception as error:  # the client's network library has errors of its own
        raise ValueError(
            f"model.path: {name!r} is no folder here, and the hub did not give it: {error}"
        ) from error
