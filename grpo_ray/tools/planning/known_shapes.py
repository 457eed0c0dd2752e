"""Shapes of published models by name, for a plan without their config.json; and where else a shape is found."""

import json
import re
from pathlib import Path
from typing import Any

from grpo_ray.config import Config
from grpo_ray.tools.planning.model_shape import ModelShape, shape_of, shape_of_tiny

HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_QWEN2 = {"model_type": "qwen2"}
_QWEN3 = {"model_type": "qwen3", "head_dim": 128}
_LLAMA = {"model_type": "llama", "vocab_size": 128256}


def _sizes(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, tied: bool
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "tie_word_embeddings": tied,
    }


def _qwen2(*sizes: Any, vocab_size: int = 151936) -> dict[str, Any]:
    return {**_QWEN2, **_sizes(*sizes), "vocab_size": vocab_size}


def _qwen3(*sizes: Any) -> dict[str, Any]:
    return {**_QWEN3, **_sizes(*sizes), "vocab_size": 151936}


def _llama(*sizes: Any) -> dict[str, Any]:
    return {**_LLAMA, **_sizes(*sizes)}


# From the config.json that each was published with.
KNOWN: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": _qwen2(896, 24, 14, 2, 4864, True),
    "qwen2.5-1.5b": _qwen2(1536, 28, 12, 2, 8960, True),
    "qwen2.5-math-1.5b": _qwen2(1536, 28, 12, 2, 8960, True),
    "qwen2.5-3b": _qwen2(2048, 36, 16, 2, 11008, True),
    "qwen2.5-7b": _qwen2(3584, 28, 28, 4, 18944, False, vocab_size=152064),
    "qwen2.5-math-7b": _qwen2(3584, 28, 28, 4, 18944, False, vocab_size=152064),
    "qwen2.5-14b": _qwen2(5120, 48, 40, 8, 13824, False, vocab_size=152064),
    "qwen2.5-32b": _qwen2(5120, 64, 40, 8, 27648, False, vocab_size=152064),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 8, 3072, True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 8, 6144, True),
    "qwen3-4b": _qwen3(2560, 36, 32, 8, 9728, True),
    "qwen3-8b": _qwen3(4096, 36, 32, 8, 12288, False),
    "llama-3.2-1b": _llama(2048, 16, 32, 8, 8192, True),
    "llama-3.2-3b": _llama(3072, 28, 24, 8, 8192, True),
    "llama-3.1-8b": _llama(4096, 32, 32, 8, 14336, False),
}


def known_shape(name: str) -> ModelShape:
    """One of `KNOWN`."""
    return shape_of(KNOWN[name], name)


def find_shape(config: Config, wanted: str | None = None) -> ModelShape:
    """The shape of the configuration's model, or of the known one that is `wanted` instead.

    A hub's model is looked up among the known ones by its name, then in the local cache; no hub is asked.

    Raises:
        ValueError: there is no config.json, or it is of no use.
    """
    model = config.model
    if wanted is not None:
        return known_shape(wanted)
    if model.tiny is not None:
        return shape_of_tiny(model.tiny, model.implementation)
    assert model.path is not None
    if (Path(model.path) / "config.json").is_file():
        return _read_shape(Path(model.path) / "config.json")
    name = model.path.rpartition("/")[2].lower()
    if name in KNOWN:
        return known_shape(name)
    return _cached_shape(model.path)


def _cached_shape(path: str) -> ModelShape:
    otherwise = f"name a shape like it with --model-shape: {', '.join(KNOWN)}"
    if not HUB_NAME.fullmatch(path):
        raise ValueError(f"model.path: no config.json in {path!r}; give a model's folder, or {otherwise}")
    from huggingface_hub import try_to_load_from_cache  # here, because most plans do without

    cached = try_to_load_from_cache(path, "config.json")
    if not isinstance(cached, str):
        raise ValueError(
            f"model.path: {path!r} is not among the models that a plan knows by name, nor in the local cache; "
            f"fetch its shape (hf download {path} config.json), or {otherwise}"
        )
    return _read_shape(Path(cached))


def _read_shape(path: Path) -> ModelShape:
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"model.path: {path} cannot be read: {error}; copy the model again") from None
    if not isinstance(config, dict):
        raise ValueError(f"model.path: {path} holds no mapping; copy the model again")
    return shape_of(config, f"model.path: {path}")
