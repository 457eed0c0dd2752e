"""Log-probabilities, entropy and tokenisation against torch.distributions and hand-made arrays."""

import math

import pytest
import torch
from torch.distributions import Categorical
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_ray.objectives import (
    compute_entropy,
    get_response_log_probs,
    token_log_probs,
    tokenize_prompt_and_output,
)


class LetterTokenizer:
    """A tokenizer with a -> 1, b -> 2, ...; like a real one it prepends a special token (99) by default."""

    def __init__(self, pad_token_id: int | None = 0, eos_token_id: int | None = 50) -> None:
        self.pad_token_id = pad_token_id
        self.eos_token_id = eos_token_id

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [99] * add_special_tokens + [ord(letter) - ord("a") + 1 for letter in text]


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=19,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).eval()


def test_entropy_by_hand_is_in_nats_and_shift_invariant():
    assert compute_entropy(torch.zeros(8)).item() == pytest.approx(math.log(8))
    quarter = torch.tensor([0.25, 0.75]).log()
    expected = 0.25 * math.log(4) + 0.75 * math.log(4 / 3)
    assert compute_entropy(quarter + 1e3).item() == pytest.approx(expected, abs=1e-4)


def test_entropy_of_extreme_and_infinite_logits():
    logits = torch.tensor([[1e4, -1e4, 0.0], [0.0, 0.0, -math.inf]], requires_grad=True)
    entropy = compute_entropy(logits)
    torch.testing.assert_close(entropy, torch.tensor([0.0, math.log(2)]))
    entropy.sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_token_log_probs_are_stable_float32_even_from_bfloat16():
    logits = torch.tensor([[[0.0, 1000.0, -1000.0]]], dtype=torch.bfloat16)
    assert token_log_probs(logits, torch.tensor([[1]])).item() == 0.0
    assert token_log_probs(logits, torch.tensor([[2]])).item() == -2000.0
    wide = torch.zeros(1, 1, 1000, dtype=torch.bfloat16)
    result = token_log_probs(wide, torch.tensor([[3]]))
    assert result.dtype == torch.float32
    assert result.item() == pytest.approx(-math.log(1000), rel=1e-6)  # bfloat16 would be off by 1e-3


@pytest.mark.parametrize(("dtype", "temperature"), [(torch.float32, 0.5), (torch.bfloat16, 1.0)])
def test_token_log_probs_have_the_gradients_of_log_softmax(dtype, temperature):
    """The logits are a slice (without the last position), with one token ruled out and weights per token."""
    generator = torch.Generator().manual_seed(0)
    whole = (4 * torch.randn(2, 6, 11, generator=generator)).to(dtype)
    whole[..., 3] = -math.inf
    labels = 4 + torch.randint(0, 7, (2, 5), generator=generator)
    weights = torch.randn(2, 5, generator=generator)
    gradients = []
    for way in (
        lambda logits: token_log_probs(logits, labels, temperature),
        lambda logits: (logits.float() / temperature).log_softmax(-1).gather(-1, labels[..., None])[..., 0],
    ):
        logits = whole.clone().requires_grad_()
        (weights * way(logits[:, :-1])).sum().backward()
        assert logits.grad is not None
        assert logits.grad.isfinite().all()
        gradients.append(logits.grad)
    torch.testing.assert_close(*gradients)


def test_response_log_probs_and_entropies_at_a_temperature():
    logits = torch.randn(2, 3, 5)
    labels = torch.tensor([[0, 1, 2], [4, 3, 2]])
    found = get_response_log_probs(lambda ids: logits, labels, labels, True, temperature=0.7)
    expected = Categorical(logits=logits / 0.7)
    torch.testing.assert_close(found["log_probs"], expected.log_prob(labels))
    torch.testing.assert_close(found["token_entropy"], expected.entropy())


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_a_temperature_that_is_not_positive_is_refused(temperature):
    with pytest.raises(ValueError, match="temperature"):
        token_log_probs(torch.zeros(1, 1, 2), torch.zeros(1, 1, dtype=torch.long), temperature)


def test_tokenize_by_hand():
    result = tokenize_prompt_and_output(["ab", "c"], ["cde", "d"], LetterTokenizer())
    assert result["input_ids"].tolist() == [[1, 2, 3, 4], [3, 4, 0, 0]]
    assert result["labels"].tolist() == [[2, 3, 4, 5], [4, 0, 0, 0]]
    assert result["response_mask"].tolist() == [[False, True, True, True], [True, False, False, False]]
    assert result["response_mask"].dtype == torch.bool
    assert result["input_ids"].dtype == torch.long


def test_tokenize_empty_prompt_and_empty_output():
    result = tokenize_prompt_and_output(["", "ab"], ["abc", ""], LetterTokenizer())
    assert result["labels"].tolist() == [[2, 3], [2, 0]]  # nothing predicts the very first token
    assert result["response_mask"].tolist() == [[True, True], [False, False]]


@pytest.mark.parametrize(("pad", "eos", "expected"), [(7, 50, 7), (0, 50, 0), (None, 50, 50), (None, None, 0)])
def test_padding_falls_back_to_the_end_token_then_to_zero(pad, eos, expected):
    result = tokenize_prompt_and_output(["a", "a"], ["bcd", "b"], LetterTokenizer(pad, eos))
    assert result["labels"][1].tolist() == [2, expected, expected]


@pytest.mark.parametrize(("prompts", "outputs"), [(["a"], []), ([], [])])
def test_prompts_without_outputs_are_refused(prompts, outputs):
    with pytest.raises(ValueError, match=f"{len(prompts)} prompts and 0 outputs"):
        tokenize_prompt_and_output(prompts, outputs, LetterTokenizer())


def test_use_cache_is_off_for_transformers_models(monkeypatch):
    model, seen = tiny_llama(), []
    original = model.forward

    def forward(*args: object, **kwargs: object) -> object:
        seen.append(kwargs.get("use_cache"))
        return original(*args, **kwargs)

    monkeypatch.setattr(model, "forward", forward)
    ids = torch.tensor([[1, 2]])
    get_response_log_probs(model, ids, ids, return_token_entropy=False)
    assert seen == [False]
