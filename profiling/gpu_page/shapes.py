"""Models with random weights in the sizes of Qwen2.5, and batches of random tokens: nothing is downloaded."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from grpo_ray.learning.attention import NAME as ATTENTION
from grpo_ray.learning.sequences import TrainSequence


@dataclass(frozen=True)
class Shape:
    """The sizes of a Qwen2 model."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int
    is_tied: bool


SHAPES = {
    "tiny": Shape(64, 2, 2, 1, 128, 512, True),  # for tests on a CPU, where vLLM takes heads of 32 and more
    "deep": Shape(64, 28, 2, 1, 64, 512, True),  # the layers of 1.5B without their work: what the host does
    "small": Shape(256, 4, 4, 2, 704, 4096, True),  # for exactness
    "0.5B": Shape(896, 24, 14, 2, 4864, 151_936, True),
    "1.5B": Shape(1536, 28, 12, 2, 8960, 151_936, True),
    "7B": Shape(3584, 28, 28, 4, 18_944, 152_064, False),
}


def build_model(name: str, device: torch.device, is_plain: bool = False, seed: int = 0) -> Qwen2ForCausalLM:
    """Build a model with random float32 weights, as the Learner loads one; `is_plain`: as transformers does.

    The weights are made on `device`; the same seed gives other ones on another device.
    """
    shape = SHAPES[name]
    config = Qwen2Config(
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        intermediate_size=shape.intermediate_size,
        vocab_size=shape.vocab_size,
        tie_word_embeddings=shape.is_tied,
        max_position_embeddings=32_768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        attn_implementation="sdpa",
    )
    torch.manual_seed(seed)
    with device:
        model = Qwen2ForCausalLM(config)
    if not is_plain:
        model.set_attn_implementation(ATTENTION)
    return model.eval()


def make_batch(
    vocab: int, prompt_tokens: int, response_tokens: Sequence[int], samples_per_prompt: int
) -> list[TrainSequence]:
    """Make a batch of random tokens, one sequence per response length; neighbours share a prompt."""
    rng = np.random.default_rng(0)
    sequences: list[TrainSequence] = []
    for index, length in enumerate(response_tokens):
        if index % samples_per_prompt == 0:
            prompt = tuple(rng.integers(0, vocab, prompt_tokens).tolist())
        response = rng.integers(0, vocab, length).astype(np.int32)
        # What a random policy assigns, so that ratios stay near 1, as in training.
        logprobs = np.full(length, -np.log(vocab), np.float32)
        sequences.append(TrainSequence(prompt, response, logprobs, float(rng.choice([-1.0, 1.0]))))
    return sequences
