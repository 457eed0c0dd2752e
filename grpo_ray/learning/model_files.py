"""A model's folder, or its name on the hub: what can be known and checked without its weights.

Imports neither torch nor a class of models, so that `check` answers quickly.
"""

import functools
import json
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedTokenizerBase
from transformers.utils import cached_file

from grpo_ray.config import Config

if TYPE_CHECKING:  # it imports torch
    from transformers import GenerationConfig, PreTrainedConfig

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
        what = "it is not a model in Hugging Face format"
        if (folder / "adapter_config.json").exists():
            what = "it holds an adapter alone; merge it into its base (`grpo-ray export RUN --merged FOLDER`)"
        raise ValueError(f"{field}: {path!r} has no config.json; {what}")
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"{field}: {path!r} has no *.safetensors; save it with save_pretrained()")
    for file in sorted({*folder.glob("*.safetensors"), *weight_files(folder, field)}):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{field}: {file} is damaged or missing ({error}); copy or download the model again"
            ) from None


def weight_files(folder: Path, field: str) -> list[Path]:
    """Return the files that a model's weights are loaded from: those of the index, or model.safetensors."""
    listing = folder / "model.safetensors.index.json"
    if not listing.exists():
        return [folder / "model.safetensors"]
    try:
        return sorted({folder / name for name in json.loads(listing.read_bytes())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(
            f"{field}: {listing} is not an index of safetensors files; copy or download the model again"
        ) from None


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer.

    Raises:
        ValueError: its files are damaged or missing.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(located(path), trust_remote_code=trust_remote_code)
    except Exception as error:  # of many kinds: even a KeyError for a damaged tokenizer.json
        raise ValueError(
            f"model.path: the tokenizer of {path!r} cannot be loaded ({type(error).__name__}: {error}); "
            "save it next to the model with save_pretrained()"
        ) from error


def max_positions(path: str, trust_remote_code: bool = False) -> int | None:
    """Return the longest sequence that the model supports, in tokens; None if its config does not say."""
    config, name = text_config(path, trust_remote_code), "original_max_position_embeddings"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":  # a longer one would change the positions of others in its batch
        return rope.get(name) or getattr(config, name, None)
    return getattr(config, "max_position_embeddings", None)


def _vocab_size(path: str, trust_remote_code: bool = False) -> int | None:
    """Return the number of the model's embeddings; None if its config does not say."""
    return getattr(text_config(path, trust_remote_code), "vocab_size", None)


def check_vocabulary(
    path: str, tokenizer: PreTrainedTokenizerBase, ends: tuple[int, ...], trust_remote_code: bool = False
) -> None:
    """Refuse a tokenizer that can give the model a token without an embedding.

    The reverse is common and harmless: a vocabulary padded to a round number has tokens that the tokenizer does
    not know, and such a token decodes to nothing when it is sampled.

    Raises:
        ValueError: a token or an end token lies outside the model's vocabulary.
    """
    size = _vocab_size(path, trust_remote_code)
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


def text_config(path: str, trust_remote_code: bool = False) -> "PreTrainedConfig":
    """Return the configuration of the model's language part; raises ValueError if config.json is of no use."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(located(path), trust_remote_code=trust_remote_code)
        return config.get_text_config()
    except Exception as error:  # of many kinds: even a ZeroDivisionError for 0 heads
        raise ValueError(f"model.path: config.json of {path!r} cannot be used: {error}") from error


def savable(given: "GenerationConfig") -> "GenerationConfig":
    """Return the generation config, or its special tokens alone if transformers would load but not save it."""
    from transformers import GenerationConfig

    try:
        given.validate(strict=True)
    except ValueError:  # such as a temperature without sampling
        names = "bos_token_id", "eos_token_id", "pad_token_id"
        return GenerationConfig(**{name: getattr(given, name) for name in names})
    return given


def end_token_ids(
    path: str, tokenizer: PreTrainedTokenizerBase, trust_remote_code: bool = False
) -> tuple[int, ...]:
    """Return every token that ends a response: the tokenizer's, and those of the model's generation config.

    Where there is none, those of config.json count, as for vLLM and transformers.

    Raises:
        ValueError: generation_config.json exists but cannot be read, or names other things than numbers.
    """
    try:
        file = cached_file(located(path), "generation_config.json")  # GenerationConfig would import torch
        ids = _numbers(json.loads(Path(str(file)).read_text(encoding="utf-8")).get("eos_token_id"))
    except (OSError, ValueError) as error:  # generation_config.json is missing or damaged
        if (damaged := Path(located(path)) / "generation_config.json").exists():
            text = f"model.path: {str(damaged)!r} is not a valid JSON file. Correct it or remove it"
            raise ValueError(text) from error
        has_config = (Path(located(path)) / "config.json").exists()
        config = text_config(path, trust_remote_code) if has_config else None
        ids = _numbers(getattr(config, "eos_token_id", None))
    except (AttributeError, TypeError) as error:
        raise ValueError(f"model.path: generation_config.json of {path!r} cannot be used: {error}") from error
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return tuple(sorted(ids))


def _numbers(listed: Any) -> set[int]:
    return {*map(index, [listed] if isinstance(listed, int) else listed or ())}


def check_ends(
    path: str, tokenizer: PreTrainedTokenizerBase, ends: tuple[int, ...], stop: tuple[str, ...]
) -> None:
    """Refuse a model with which no response would end, and a stop string that would end none.

    Raises:
        ValueError: there is neither an end token nor a stop string, or one contains a special token.
    """
    if not ends and not stop:
        raise ValueError(
            f"sampling.stop: neither the tokenizer of {path!r} nor its generation_config.json or config.json "
            "names an end token, so every response would run to sampling.max_tokens; give sampling.stop, or "
            "set eos_token in tokenizer_config.json"
        )
    for token, number in zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True):
        if number not in ends and (found := [text for text in stop if token in text]):
            raise ValueError(
                f"sampling.stop: {found[0]!r} would end nothing, as the special token {token!r} is not in the "
                f"text of a response; add {number} to eos_token_id in generation_config.json of {path!r}"
            )


def at_commit(path: str, field: str = "model.path") -> str:
    """Return `owner/name@commit` for a model on the hub, and any other path as it is.

    The commit is the newest of the hub, or of the local cache if the hub does not answer.

    Raises:
        ValueError: neither has the model.
    """
    if is_local(path):
        return path
    name, _, revision = path.partition("@")
    try:
        commit = HfApi().model_info(name, revision=revision or None, timeout=10).sha
    except Exception as error:  # the client's network library raises its own errors
        cached = try_to_load_from_cache(name, "config.json", revision=revision or None)
        if not isinstance(cached, str):
            raise ValueError(
                f"{field}: {path!r} is not a local folder, and cannot be read from the hub: {error}; "
                f"a relative path begins in {Path.cwd()}"
            ) from error
        commit = Path(cached).parent.name
    return f"{name}@{commit}"


def check_teacher(config: Config, tokenizer: PreTrainedTokenizerBase, longest_prompt: int) -> None:
    """Refuse a teacher that cannot judge the policy's tokens: another vocabulary, or too few positions.

    Args:
        tokenizer: the policy's.

    Raises:
        ValueError: names the field, both models, and what differs.
    """
    path = config.distillation.teacher
    if path is None:
        return
    policy = config.model.path or "the tiny model"
    try:
        of_teacher = load_tokenizer(path)
        check_vocabulary(path, of_teacher, ())
    except ValueError as error:
        raise ValueError(f"distillation.teacher: {str(error).removeprefix('model.path: ')}") from error
    own, others = tokenizer.get_vocab(), of_teacher.get_vocab()
    different = sorted(token for token in {*own, *others} if own.get(token) != others.get(token))
    if different:
        token = different[0]
        raise ValueError(
            f"distillation.teacher: the vocabulary of {path!r} differs from that of {policy!r} (model): "
            f"{len(different)} tokens, such as {token!r}, number {others.get(token, 'none')} there and "
            f"{own.get(token, 'none')} here; give a teacher of the same family"
        )
    size = _vocab_size(path)
    most = _vocab_size(config.model.path, config.model.trust_remote_code) if config.model.path else None
    if size is not None and most is not None and most > size:  # a tiny policy has those of its tokenizer
        raise ValueError(
            f"distillation.teacher: {path!r} has embeddings of {size} tokens, and {policy!r} can sample "
            f"{most}; resize those of the policy with model.resize_token_embeddings({size})"
        )
    length = config.generator.max_model_len or longest_prompt + config.sampling.max_tokens
    length += config.distillation.engine == "vllm"  # which draws a token after those that it judges
    positions = max_positions(path)
    if positions is not None and length > positions:
        raise ValueError(
            f"distillation.teacher: {path!r} has {positions} positions, but sequences have up to {length} "
            "tokens; lower sampling.max_tokens, or give a teacher with more"
        )
