"""A model's shape: the sizes in its config.json from which parameters, activations and KV cache follow.

Also the data sheets of GPUs.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_ray.config.model import AdapterConfig, ModelConfig

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")  # every weight of these is counted
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*(?:@.+)?")
GB = 1e9


@dataclass(frozen=True)
class ModelShape:
    """A decoder with grouped-query attention, SwiGLU and RMSNorm: Llama and its relatives."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    is_tied: bool  # the output layer shares the embeddings' weights
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
        """Number of values in one layer's matrices: q, k, v and o; gate, up and down."""
        return sum(inputs * outputs for inputs, outputs in self.linear_sizes.values())

    @property
    def linear_sizes(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of one layer's matrices, by their names in the model."""
        h, q, kv, i = self.hidden_size, self.query_width, self.kv_width, self.intermediate_size
        return {
            "q_proj": (h, q), "k_proj": (h, kv), "v_proj": (h, kv), "o_proj": (q, h),
            "gate_proj": (h, i), "up_proj": (h, i), "down_proj": (i, h),
        }  # fmt: skip

    @property
    def embedding(self) -> int:
        """Number of values in the embeddings, and in an output layer of its own."""
        return self.vocab_size * self.hidden_size

    @property
    def block_parameters(self) -> int:
        """Number of values in one layer: matrices, biases and norms."""
        biases = self.has_qkv_bias * (self.query_width + 2 * self.kv_width)
        biases += self.has_output_bias * self.hidden_size
        biases += self.has_mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        norms = 2 * self.hidden_size + self.has_qk_norm * 2 * self.head_dim
        return self.layer_matrices + biases + norms

    @property
    def root_parameters(self) -> int:
        """Number of values outside of the layers: embeddings, norm and output layer."""
        return self.embedding * (1 if self.is_tied else 2) + self.hidden_size

    @property
    def num_parameters(self) -> int:
        return self.num_layers * self.block_parameters + self.root_parameters

    def adapter_parameters(self, adapter: AdapterConfig | None) -> int:
        """Return the number of values in an adapter of linear layers, 0 without one; ValueError for others."""
        if adapter is None:
            return 0
        sizes = self.linear_sizes
        named = {target.rpartition(".")[2] for target in adapter.target_modules or sizes}
        if unknown := sorted(named - sizes.keys()):
            raise ValueError(f"model.adapter.target_modules: no {unknown[0]}; there are {', '.join(sizes)}")
        found = [size for name, size in sizes.items() if name in named]
        dora = sum(outputs for _, outputs in found) if adapter.dora else 0
        return self.num_layers * (adapter.rank * sum(map(sum, found)) + dora)


def find_shape(model: ModelConfig) -> ModelShape:
    """Return the shape of the model, from a config.json on this machine; no hub is asked.

    Raises:
        ValueError: there is no config.json, or it is not usable.
    """
    if model.tiny is not None:
        tiny = model.tiny
        return ModelShape(
            tiny.hidden_size, tiny.num_layers, tiny.num_heads, tiny.num_kv_heads,
            tiny.hidden_size // tiny.num_heads, tiny.intermediate_size, tiny.vocab_size, tiny.tie_embeddings,
            has_qkv_bias=model.implementation == "transformers",
        )  # fmt: skip
    assert model.path is not None
    from grpo_ray.records.adapter_files import folder_of_model  # loads the hub's client

    folder = folder_of_model(model.path)
    if folder is None and not HUB_NAME.fullmatch(model.path):
        raise ValueError(f"model.path: no config.json in {model.path!r}; give a model's folder")
    if folder is None:
        raise ValueError(
            f"model.path: the config.json of {model.path!r} is not on this machine, and `plan` does not use "
            f"the network; fetch it with `hf download {model.path} config.json`, or give a folder that has it"
        )
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"model.path: {path} cannot be read: {error}; copy the model again") from None
    if not isinstance(config, dict):
        raise ValueError(f"model.path: {path} holds no mapping; copy the model again")
    return shape_of(config, f"model.path: {path}")


def shape_of(config: Mapping[str, Any], source: str) -> ModelShape:
    """Return the shape that the contents of a config.json describe; `source` begins the messages.

    Raises:
        ValueError: the family is not known, or a size is missing.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"{source}: model_type is {family!r}; a plan covers {', '.join(FAMILIES)}")
    for key in SIZES:
        if not isinstance(size := config.get(key), int) or size < 1:
            raise ValueError(f"{source}: {key} is {size!r}; it must be a whole number above 0")
    hidden_size, num_layers, num_heads, intermediate_size, vocab_size = (config[key] for key in SIZES)
    attention_bias = bool(config.get("attention_bias", False))
    return ModelShape(
        hidden_size,
        num_layers,
        num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=config.get("head_dim") or hidden_size // num_heads,
        intermediate_size=intermediate_size,
        vocab_size=vocab_size,
        is_tied=bool(config.get("tie_word_embeddings", family == "smollm3")),
        has_qkv_bias=family == "qwen2" or attention_bias,
        has_output_bias=family != "qwen2" and attention_bias,
        has_mlp_bias=bool(config.get("mlp_bias", False)),
        has_qk_norm=family == "qwen3",
    )


@dataclass(frozen=True)
class GpuType:
    """Dense peaks and bandwidths from a data sheet."""

    memory_gib: float
    bfloat16_flops: float  # FLOP/s in bfloat16 and float16
    float32_flops: float
    bandwidth: float  # bytes per second of the memory
    link: float  # bytes per second and direction to the other GPUs of a node: NVLink, or else PCIe

    def flops(self, dtype: str) -> float:
        return self.float32_flops if dtype == "float32" else self.bfloat16_flops


GPU_TYPES: Mapping[str, GpuType] = {  # the FLOP/s are those of watch/flops.py, which imports torch
    "A100": GpuType(80, 312e12, 19.5e12, 2039 * GB, 300 * GB),
    "H100": GpuType(80, 989e12, 67e12, 3350 * GB, 450 * GB),
    "H200": GpuType(140, 989e12, 67e12, 4800 * GB, 450 * GB),
    "B200": GpuType(179, 2250e12, 75e12, 8000 * GB, 900 * GB),
    "L40S": GpuType(45, 362e12, 91.6e12, 864 * GB, 32 * GB),
}


@dataclass(frozen=True)
class Machine:
    """The nodes that a run is planned for."""

    gpu: GpuType
    gpus_per_node: int = 8
    network: float = 50 * GB  # bytes per second and direction between two nodes, of a node's adapters together
