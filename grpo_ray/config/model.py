"""The configuration of the model: loaded from a folder or hub, or built tiny."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from grpo_ray.config.section import HomePath, Section, not_empty

Attention = Literal["auto", "sdpa", "varlen", "flash_attention_2", "flash_attention_3"]
Implementation = Literal["transformers", "grpo_ray"]
HeadDtype = Literal["model", "float32"]


class WarmupConfig(Section):
    """A short supervised run that gives the tiny model something to improve on."""

    num_steps: PositiveInt = 300
    """AdamW steps."""
    batch_size: PositiveInt = 64
    """Examples per step."""
    learning_rate: PositiveFloat = 3e-3
    """Peak learning rate, after a linear ramp over a tenth of the steps; then linear decay to 0."""
    num_threads: PositiveInt = 2
    """CPU threads (nothing else is running yet)."""


class TinyModelConfig(Section):
    """A model and tokenizer built from the seed, for machines without a model hub.

    Its architecture is Qwen2, or with `model.implementation: grpo_ray` a TransformerLM (Llama).
    """

    hidden_size: PositiveInt = 128
    """Width of the residual stream."""
    num_layers: PositiveInt = 4
    """Transformer blocks."""
    num_heads: PositiveInt = 4
    """Attention heads per block."""
    num_kv_heads: PositiveInt = 2
    """Key and value heads; each is shared by `num_heads / num_kv_heads` query heads."""
    intermediate_size: PositiveInt = 352
    """Width of each block's MLP."""
    vocab_size: Annotated[int, Field(ge=260)] = 384
    """Vocabulary size: 256 bytes, the end token, and merges learned from the task's text."""
    max_position_embeddings: PositiveInt = 512
    """Longest sequence, in tokens."""
    tie_embeddings: bool = True
    """Use the embeddings as the weights of the output layer."""
    initializer_range: PositiveFloat = 0.02  # as in the configurations of Llama and Qwen2
    """Standard deviation of the random initial weights."""
    warmup: WarmupConfig | None = WarmupConfig()
    """`null` leaves the weights at their random initial values."""

    def _conflicts(self) -> Iterator[str]:
        if self.hidden_size % (2 * self.num_heads):
            yield f"hidden_size ({self.hidden_size}) must be a multiple of 2 * num_heads ({self.num_heads})"
        if self.num_heads % self.num_kv_heads:
            yield f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})"


class AdapterConfig(Section):
    """A trainable adapter on the frozen model, through the library peft."""

    kind: Literal["lora"] = "lora"
    """`lora` adds to each adapted matrix a product of two narrow ones (Hu et al. 2021)."""
    rank: PositiveInt = 16
    """Width of the narrow matrices."""
    alpha: PositiveInt = 32
    """Scale of the product: it is multiplied by `alpha / rank`, or with `rslora` by `alpha / sqrt(rank)`."""
    target_modules: Annotated[
        tuple[str, ...] | None,
        not_empty("an empty list adapts nothing; name linear layers, or give null for all"),
    ] = None
    """Linear layers to adapt, by name, such as `q_proj`; `null`: all but the output layer."""
    rslora: bool = False
    """Divide `alpha` by the square root of the rank (Kalajdzievski 2023)."""
    dora: bool = False
    """Also train the norm of each of the matrix's rows (DoRA, Liu et al. 2024)."""
    path: HomePath | None = None
    """A folder in PEFT's format to start from, as a checkpoint; `null`: a new one, at first without effect."""


class ModelConfig(Section):
    path: HomePath | None = None
    """A folder in Hugging Face format, or a hub name such as `Qwen/Qwen2.5-Math-1.5B`, optionally with `@` and
    a branch, tag or commit. A run keeps the commit that it began with."""
    tiny: TinyModelConfig | None = None
    """Shape of a tiny model to build instead of loading one."""
    implementation: Implementation = "transformers"
    """Model code: transformers' classes, or `grpo_ray`'s own TransformerLM, which runs any plain Llama."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of the served weights and of the Learner's forward pass (master weights are float32). On a CPU
    without instructions for bfloat16 the default is `float32`."""
    head_dtype: HeadDtype = "model"
    """Data type in which the Learner, the engines and the teacher compute logits. `float32` casts the output
    layer's inputs and weights, which stay in `dtype`; with `dtype: float32` it changes nothing."""
    attention: Attention = "auto"
    """Kernel of the Learner's attention: `sdpa` is torch's scaled_dot_product_attention, `varlen` is torch's
    FlashAttention for packed rows, `flash_attention_2` and `flash_attention_3` are packages. `auto` is `varlen`
    on GPUs in bfloat16, and `sdpa` elsewhere."""
    adapter: AdapterConfig | None = None
    """Adapter to train instead of the model's own weights, which stay as they are."""
    base_quantization: Literal["none", "nf4"] = "none"
    """`nf4` keeps the linear layers under an adapter in 4 bits in the Learner. Generators sample from the
    dequantized weights, which the Learner also trains on. Needs the package bitsandbytes."""
    trust_remote_code: bool = False
    """Run Python code shipped with the model."""

    def _conflicts(self) -> Iterator[str]:
        if (self.path is None) == (self.tiny is None):
            yield "give exactly one of `path` (a folder or hub name) and `tiny` (build one)"
        if self.base_quantization != "none" and self.adapter is None:
            yield (
                f"base_quantization: {self.base_quantization} weights cannot be trained; add model.adapter to "
                "train an adapter on them, or set base_quantization to none"
            )
