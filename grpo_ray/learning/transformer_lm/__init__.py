"""The package's own model (`model.implementation: grpo_ray`): a plain Llama in torch, and its folders."""

from grpo_ray.learning.transformer_lm.llama_layout import check_llama, transformer_lm_of
from grpo_ray.learning.transformer_lm.model import TransformerLM

__all__ = ["TransformerLM", "check_llama", "transformer_lm_of"]
