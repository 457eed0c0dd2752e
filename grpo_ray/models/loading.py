"""Loading a policy and its tokenizer, checking them, and reading facts about them."""

import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from grpo_ray.config.model import Implementation
from grpo_ray.models.attention import NAME as ATTENTION
from grpo_ray.models.attention import tree_obstacle
from grpo_ray.models.policy_model import PolicyModel
from grpo_ray.models.transformer_lm import TransformerLM, check_plain, load_transformer_lm

WEIGHTS = "model*.safetensors"  # excludes second copies under other names
NO_WEIGHTS = ["*.json", "*.jinja", "*.model", "*.txt", "*.py"]


def is_local(path: str) -> bool:
    """Return whether `model.path` names a local folder rather than a model on a hub (`owner/name`)."""
    return path.startswith(("/", "./", "../")) or Path(path).exists() or path.count("/") != 1


@functools.cache
def located(path: str, weights: bool = False) -> str:
    """Return a path that `from_pretrained` takes: for `owner/name@revision` the folder in the hub's cache.

    It is downloaded if necessary. Any other path is returned as it is.

    Args:
        weights: fetch the weights too.

    Raises:
        ValueError: neither the hub nor its cache has the revision.
    """
    name, _, revision = path.partition("@")
    if is_local(path) or not revision:
        return path
    try:
        return snapshot_download(
            name, revision=revision, allow_patterns=[*NO_WEIGHTS, WEIGHTS] if weights else NO_WEIGHTS
        )
    except Exception as error:  # the client's network library raises its own errors
        raise ValueError(f"model.path: {path!r} cannot be fetched from the hub: {error}") from error


def check_local_model(path: str, field: str = "model.path") -> None:
    """Refuse a local folder without a usable model, before anything is started.

    Only the headers of the weights are read; their values are checked by `load_policy`.

    Raises:
        ValueError: the folder is missing, has no config.json or no weights, or a file of weights is damaged.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"{field}: no folder {path!r}; give a folder in Hugging Face format or a hub name")
    if not (folder / "config.json").exists():
        raise ValueError(f"{field}: {path!r} has no config.json; it is not a model in Hugging Face format")
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"{field}: {path!r} has no *.safetensors; save it with save_pretrained()")
    for file in [*sorted(folder.glob("*.safetensors")), *_listed_shards(folder, field)]:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{field}: {file} is damaged or missing ({error}); copy or download the model again"
            ) from None


def _listed_shards(folder: Path, field: str) -> list[Path]:
    """Return the files listed in the index of a sharded model."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return []
    try:
        return sorted({folder / name for name in json.loads(index.read_bytes())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(
            f"{field}: {index} is not an index of safetensors files; copy or download the model again"
        ) from None


def skeleton(path: str, trust_remote_code: bool, implementation: Implementation) -> PolicyModel:
    """Return the model without memory for its weights, to learn the names and shapes of its layers."""
    path = located(path)
    with torch.device("meta"):
        if implementation == "grpo_ray":
            return TransformerLM(check_llama(path))
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=trust_remote_code, attn_implementation="sdpa"
        )
    return _with_tree_attention(model)


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer.

    Raises:
        ValueError: its files are damaged or missing.
    """
    try:
        return AutoTokenizer.from_pretrained(located(path), trust_remote_code=trust_remote_code)
    except Exception as error:  # of many kinds: even a KeyError for a damaged tokenizer.json
        raise ValueError(
            f"model.path: the tokenizer of {path!r} cannot be loaded ({type(error).__name__}: {error}); "
            "save it next to the model with save_pretrained()"
        ) from error


def load_policy(
    path: str,
    trust_remote_code: bool = False,
    implementation: Implementation = "transformers",
    dtype: torch.dtype = torch.float32,
) -> PolicyModel:
    """Load the model in evaluation mode (no dropout, since the sampler has none).

    Args:
        dtype: of the weights: float32 for those that are trained.

    Raises:
        ValueError: weights are missing, not finite or of a shape that does not match config.json; or
            TransformerLM does not support the model.
    """
    folder = located(path, weights=True)
    if implementation == "grpo_ray":
        model, wrong = _load_transformer_lm(folder)
        cast_parameters(model.parameters(), dtype)
    else:
        model, wrong = _load_transformers(folder, trust_remote_code, dtype)
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(
            f"model.path: {path!r} lacks tensors, or their shapes do not match its config.json: "
            f"{', '.join(wrong[:3])}{more}; copy or save the model again"
        )
    check_finite(model, path)
    return model.eval()


def _load_transformers(path: str, trust_remote_code: bool, dtype: torch.dtype) -> tuple[PolicyModel, list[str]]:
    """Load with transformers; also return the tensors that it could not find and filled with random values."""
    model, found = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, trust_remote_code=trust_remote_code, attn_implementation="sdpa",
        ignore_mismatched_sizes=True, output_loading_info=True, use_safetensors=True,
    )  # fmt: skip
    wrong = [*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])]
    return _with_tree_attention(model), sorted(wrong)


def _with_tree_attention(model: Any) -> PolicyModel:
    if tree_obstacle(model) is None:
        model.set_attn_implementation(ATTENTION)
    return model  # type: ignore[no-any-return]


def _load_transformer_lm(path: str) -> tuple[PolicyModel, list[str]]:
    config = check_llama(path)
    folder = Path(path if is_local(path) else snapshot_download(path, allow_patterns=["*.json", WEIGHTS]))
    return load_transformer_lm(
        config, folder, _listed_shards(folder, "model.path") or [folder / "model.safetensors"]
    )


def check_llama(path: str) -> LlamaConfig:
    """Return the model's configuration if TransformerLM supports it.

    Raises:
        ValueError: names every unsupported property.
    """
    return check_plain(_text_config(path, trust_remote_code=False), path)


def check_finite(model: PolicyModel, path: str) -> None:
    """Refuse a model with values that are NaN or infinite, with which neither sampling nor learning works.

    Raises:
        ValueError: names the first such tensor.
    """
    bad = {name: int((~torch.isfinite(p)).sum()) for name, p in model.named_parameters()}
    bad = {name: number for name, number in bad.items() if number}
    if bad:
        name, number = next(iter(bad.items()))
        size = model.get_parameter(name).numel()
        more = f", and some in {len(bad) - 1} of its other tensors" if len(bad) > 1 else ""
        raise ValueError(
            f"model.path: {number:,} of {size:,} values of {name!r} in {path!r} are NaN or infinite{more}; "
            "use a checkpoint from before the model broke"
        )


def cast_parameters(parameters: Iterable[torch.nn.Parameter], dtype: torch.dtype) -> None:
    """Cast parameters in place; `model.to(dtype)` would also round buffers such as rotary frequencies.

    (With frequencies in bfloat16, the angle at position 1,000 is off by 1.2 rad.)
    """
    for parameter in parameters:
        parameter.data = parameter.data.to(dtype)


def max_positions(path: str, trust_remote_code: bool = False) -> int | None:
    """Return the longest sequence that the model supports, in tokens; None if its config does not say."""
    return getattr(_text_config(path, trust_remote_code), "max_position_embeddings", None)


def check_vocabulary(
    path: str, tokenizer: PreTrainedTokenizerBase, ends: tuple[int, ...], trust_remote_code: bool = False
) -> None:
    """Refuse a tokenizer that can give the model a token without an embedding.

    The reverse is common and harmless: a vocabulary padded to a round number has tokens that the tokenizer does
    not know, and such a token decodes to nothing when it is sampled.

    Raises:
        ValueError: a token or an end token lies outside the model's vocabulary.
    """
    size = getattr(_text_config(path, trust_remote_code), "vocab_size", None)
    if size is None:
        return
    needed = max(tokenizer.get_vocab().values(), default=-1) + 1
    if needed > size:
        raise ValueError(
            f"model.path: the tokenizer of {path!r} has {needed} tokens, but the model's vocab_size is {size}; "
            f"use the model's own tokenizer, or resize the model with model.resize_token_embeddings({needed})"
        )
    if outside := [token for token in ends if not 0 <= token < size]:
        raise ValueError(
            f"model.path: generation_config.json of {path!r} has the end tokens {outside}, but the model's "
            f"vocab_size is {size}; correct eos_token_id"
        )


def _text_config(path: str, trust_remote_code: bool) -> PreTrainedConfig:
    try:
        config = AutoConfig.from_pretrained(located(path), trust_remote_code=trust_remote_code)
        return config.get_text_config()
    except (OSError, ValueError, StrictDataclassError) as error:
        raise ValueError(f"model.path: config.json of {path!r} cannot be used: {error}") from error


def end_token_ids(path: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return every token that ends a response: the tokenizer's, and those of the model's generation config.

    Raises:
        ValueError: generation_config.json exists but cannot be read.
    """
    try:
        listed = GenerationConfig.from_pretrained(located(path)).eos_token_id
    except OSError as error:  # generation_config.json is missing or damaged
        if (Path(located(path)) / "generation_config.json").exists():
            raise ValueError(f"model.path: {error} Correct it or remove it") from error
        listed = None
    ids = {listed} if isinstance(listed, int) else set(listed or ())
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return tuple(sorted(ids))


def check_lengths(
    longest_prompt: int, max_tokens: int, limit: int | None, what: str, place: str = "", remedy: str = ""
) -> None:
    """Refuse prompts and responses that do not fit `limit` tokens (None: no known limit).

    Args:
        what: the name of the limit in the message.
        place: the file and line of the longest prompt, if it has one.
        remedy: an alternative to fewer response tokens.

    Raises:
        ValueError: the longest prompt and response together exceed the limit.
    """
    if limit is not None and longest_prompt + max_tokens > limit:
        raise ValueError(
            f"sampling.max_tokens: {max_tokens} response tokens after the longest prompt "
            f"({longest_prompt} tokens{place and f': {place}'}) do not fit {what} ({limit}); "
            f"set it to {max(0, limit - longest_prompt)} or less{remedy and f', {remedy}'}"
        )


def at_commit(path: str | None, field: str = "model.path") -> str | None:
    """Return `owner/name@commit` for a model on the hub, and any other path as it is.

    The commit is the newest of the hub, or of the local cache if the hub does not answer.

    Raises:
        ValueError: neither has the model.
    """
    if path is None or is_local(path):
        return path
    name, _, revision = path.partition("@")
    try:
        commit = HfApi().model_info(name, revision=revision or None, timeout=10).sha
    except Exception as error:  # the client's network library raises its own errors
        cached = try_to_load_from_cache(name, "config.json", revision=revision or None)
        if not isinstance(cached, str):
            raise ValueError(
                f"{field}: {path!r} is not a local folder, and cannot be read from the hub: {error}"
            ) from error
        commit = Path(cached).parent.name
    return f"{name}@{commit}"
