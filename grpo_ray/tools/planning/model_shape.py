"""A model's shape: what of it memory follows from, read from config.json alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_ray.config.model import Implementation, TinyModelConfig

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")  # whose every weight is counted here
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")


@dataclass(frozen=True)
class ModelShape:
    """A decoder with grouped-query attention, SwiGLU and RMSNorm: Llama, and its kin."""

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    is_tied: bool
    """The output layer is the embeddings."""
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def layer_matrices(self) -> int:
        """Values in one layer's matrices: q, k, v and o; gate, up and down."""
        attention = 2 * self.hidden_size * (self.query_width + self.kv_width)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def layer_parameters(self) -> int:
        """With biases, and the two norms."""
        biases = self.has_qkv_bias * (self.query_width + 2 * self.kv_width)
        biases += self.has_output_bias * self.hidden_size
        biases += self.has_mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        norms = 2 * self.hidden_size + self.has_qk_norm * 2 * self.head_dim
        return self.layer_matrices + biases + norms

    @property
    def embedding(self) -> int:
        """Values in the embeddings, and as many in an output layer of its own."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        embeddings = self.embedding if self.is_tied else 2 * self.embedding
        return embeddings + self.num_layers * self.layer_parameters + self.hidden_size

    @property
    def multiplied(self) -> int:
        """Values in every matrix that tokens are multiplied with, the output layer's included."""
        return self.num_layers * self.layer_matrices + self.embedding

    @property
    def cached_per_token(self) -> int:
        """Values that the KV cache holds of a token: a key and a value a layer and key-value head."""
        return 2 * self.num_layers * self.kv_width


def shape_of(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape that a model's config.json describes; `name` begins the messages.

    Raises:
        ValueError: it is of another family, or lacks a size.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(
            f"{name}: model_type is {family!r}; a plan knows {', '.join(FAMILIES)}: "
            "give the nearest of them with --model-shape"
        )
    sizes = {}
    for key in SIZES:
        if not isinstance(size := config.get(key), int) or size < 1:
            raise ValueError(f"{name}: {key} is {size!r}; it must be a whole number above 0")
        sizes[key] = size
    heads = sizes["num_attention_heads"]
    attention_bias = bool(config.get("attention_bias", False))
    return ModelShape(
        name=name,
        hidden_size=sizes["hidden_size"],
        num_layers=sizes["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or sizes["hidden_size"] // heads,
        intermediate_size=sizes["intermediate_size"],
        vocab_size=sizes["vocab_size"],
        is_tied=bool(config.get("tie_word_embeddings", family == "smollm3")),
        has_qkv_bias=family == "qwen2" or attention_bias,
        has_output_bias=family != "qwen2" and attention_bias,
        has_mlp_bias=bool(config.get("mlp_bias", False)),
        has_qk_norm=family == "qwen3",
    )


def shape_of_tiny(tiny: TinyModelConfig, implementation: Implementation) -> ModelShape:
    """Of the model that `model.tiny` builds."""
    return ModelShape(
        name="the tiny model",
        hidden_size=tiny.hidden_size,
        num_layers=tiny.num_layers,
        num_heads=tiny.num_heads,
        num_kv_heads=tiny.num_kv_heads,
        head_dim=tiny.hidden_size // tiny.num_heads,
        intermediate_size=tiny.intermediate_size,
        vocab_size=tiny.vocab_size,
        is_tied=tiny.tie_embeddings,
        has_qkv_bias=implementation == "transformers",
    )
