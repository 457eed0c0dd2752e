"""Log-probabilities, entropy, KL, tokenisation: torch.distributions, hand-made arrays, all logits at once."""

import math
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_ray.objectives import (
    chunked_log_probs,
    compute_entropy,
    get_response_log_probs,
    kl_estimate,
    token_log_probs,
    tokenize_prompt_and_output,
)
from grpo_ray.objectives.kl import mismatch_sums


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
        vocab_size=19, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, initializer_range=0.5,
    )  # fmt: skip
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
    result = token_log_probs(torch.zeros(1, 1, 1000, dtype=torch.bfloat16), torch.tensor([[3]]))
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
    logits = torch.randn(2, 3, 5).bfloat16()
    labels = torch.tensor([[0, 1, 2], [4, 3, 2]])
    found = get_response_log_probs(lambda ids: logits, labels, labels, True, temperature=0.7)
    expected = Categorical(logits=logits.float() / 0.7)
    torch.testing.assert_close(found["log_probs"], expected.log_prob(labels))
    torch.testing.assert_close(found["token_entropy"], expected.entropy())


def test_tokenize_by_hand():
    result = tokenize_prompt_and_output(["ab", "c"], ["cde", "d"], LetterTokenizer())
    assert result["input_ids"].tolist() == [[1, 2, 3, 4], [3, 4, 0, 0]]
    assert result["labels"].tolist() == [[2, 3, 4, 5], [4, 0, 0, 0]]
    assert result["response_mask"].tolist() == [[False, True, True, True], [True, False, False, False]]
    assert result["response_mask"].dtype == torch.bool
    assert result["input_ids"].dtype == torch.long
    # An empty prompt, and an empty output.
    result = tokenize_prompt_and_output(["", "ab"], ["abc", ""], LetterTokenizer())
    assert result["labels"].tolist() == [[2, 3], [2, 0]]  # nothing predicts the very first token
    assert result["response_mask"].tolist() == [[True, True], [False, False]]


@pytest.mark.parametrize(("pad", "eos", "expected"), [(7, 50, 7), (0, 50, 0), (None, 50, 50), (None, None, 0)])
def test_padding_falls_back_to_the_end_token_then_to_zero(pad, eos, expected):
    result = tokenize_prompt_and_output(["a", "a"], ["bcd", "b"], LetterTokenizer(pad, eos))
    assert result["labels"][1].tolist() == [2, expected, expected]


def test_prompts_without_outputs_are_refused():
    for prompts in (["a"], []):
        with pytest.raises(ValueError, match=f"{len(prompts)} prompts and 0 outputs"):
            tokenize_prompt_and_output(prompts, [], LetterTokenizer())


def test_use_cache_is_off_for_transformers_models(monkeypatch):
    model, ids = tiny_llama(), torch.tensor([[1, 2]])
    forward = Mock(wraps=model.forward)
    monkeypatch.setattr(model, "forward", forward)
    get_response_log_probs(model, ids, ids, return_token_entropy=False)
    assert [call.kwargs.get("use_cache") for call in forward.call_args_list] == [False]


K3 = [math.exp(-0.5) + 0.5 - 1, math.e - 2, 0]  # e^d - d - 1 with d = -0.5, 1, 0


@pytest.mark.parametrize(
    ("estimator", "values", "slopes"),
    [
        ("k1", [0.5, -1, 0], [1, 1, 1]),
        ("k2", [0.125, 0.5, 0], [0.5, -1, 0]),
        ("k3", K3, [1 - math.exp(-0.5), 1 - math.e, 0]),
        ("k1+", [0.5, -1, 0], [0.5, -1, 0]),  # straight through: the gradient of k2
        ("k3+", K3, [0.5, -1, 0]),
        # r * k3, and r * k3 + r * (1 - e^d), with r = 1, 1/e, 1
        ("unbiased", [K3[0], K3[1] / math.e, 0], [0.5, -1 / math.e, 0]),
    ],
)
def test_estimates_and_their_gradients_by_hand_and_by_finite_differences(estimator, values, slopes):
    policy = torch.tensor([[-1.0, -2.0, -0.3]], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([[-1.5, -1.0, -0.3]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1.0, -1.0, -0.3]], dtype=torch.float64)
    found = kl_estimate(policy, reference, estimator, old)
    assert found[0].tolist() == pytest.approx(values)
    found.sum().backward()
    assert policy.grad[0].tolist() == pytest.approx(slopes)
    assert reference.grad is None
    fixed = reference.detach()
    if "+" not in estimator:
        assert torch.autograd.gradcheck(lambda new: kl_estimate(new, fixed, estimator, old), (policy,))


@pytest.mark.parametrize("difference", [1e-4, -1e-4])
def test_k3_of_a_small_difference_is_accurate_in_float32(difference):
    zero = torch.zeros(1, 1)
    value = kl_estimate(zero, torch.full((1, 1), difference), "k3").item()
    assert value == pytest.approx(0.5e-8, rel=2e-3)  # exp(d) - d - 1 would be wrong in the first digit


def test_k3_never_overflows_and_never_pushes_the_policy_away():
    policy = torch.tensor([[-1e4, -torch.inf, -25.0, 0.0]], requires_grad=True)
    reference = torch.tensor([[0.0, -1.0, 0.0, -1e4]])
    value = kl_estimate(policy, reference, "k3")
    expected = torch.tensor([[math.exp(20) - 21] * 3 + [1e4 - 1]])
    torch.testing.assert_close(value, expected)
    value.sum().backward()
    # A positive gradient lowers the policy: correct exactly where it is above the reference.
    assert policy.grad.tolist() == [[0.0, 0.0, 0.0, 1.0]]


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"'k4'.*k1, k2, k3"):
        kl_estimate(torch.zeros(1, 1), torch.zeros(1, 1), "k4")
    with pytest.raises(ValueError, match="reference_log_probs"):
        kl_estimate(torch.zeros(2, 3), torch.zeros(1, 3), "k1")
    with pytest.raises(ValueError, match="`unbiased` needs old_log_probs"):
        kl_estimate(torch.zeros(2, 3), torch.zeros(2, 3), "unbiased")
    with pytest.raises(ValueError, match="old_log_probs has shape"):
        kl_estimate(torch.zeros(2, 3), torch.zeros(2, 3), "unbiased", torch.zeros(1, 3))


# ---- the mismatch of sampler and Learner ----


def test_nan_of_the_learner_is_hidden_outside_the_mask_alone_and_an_empty_mask_gives_zero():
    learner = torch.full((1, 2), float("nan"), requires_grad=True)
    result = mismatch_sums(learner, torch.zeros(1, 2), torch.zeros(1, 2))
    assert {name: value.item() for name, value in result.items()} == dict.fromkeys(result, 0)
    assert not any(value.requires_grad for value in result.values())
    assert mismatch_sums(*3 * [torch.zeros(1, 0)]) == result
    assert mismatch_sums(learner, torch.zeros(1, 2), torch.ones(1, 2))["mismatch_kl"].isnan()


# ---- by chunks, against log_softmax on all logits, with autograd's gradients ----


TOKENS, WIDTH, VOCAB = 37, 16, 101
ENDS = (3, 50)


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCAB, WIDTH, dtype=dtype, requires_grad=True)
    is_ruled_out = torch.arange(TOKENS) % 3 == 0
    labels = torch.randint(51, VOCAB, (TOKENS,))
    return hidden, weight, labels, is_ruled_out


def plain(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, is_ruled_out: Tensor | None
) -> tuple[Tensor, Tensor]:
    logits = (hidden @ weight.T).double() / temperature
    if is_ruled_out is not None:
        banned = torch.zeros_like(logits, dtype=torch.bool)
        banned[:, list(ENDS)] = True
        logits = logits.masked_fill(banned & is_ruled_out[:, None], torch.finfo(torch.float32).min)
    log_probs = logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    return log_probs.float(), compute_entropy(logits).float()


COMPILED = pytest.param(12, True, marks=pytest.mark.campaign)


@pytest.mark.parametrize(("rows_per_chunk", "is_compiled"), [(1, 0), (5, 0), (37, 0), (1000, 0), COMPILED])
@pytest.mark.parametrize(("temperature", "rules_out"), [(1.0, False), (0.6, True)])
@pytest.mark.parametrize("uses", [(1.0, 0.0), (0.0, 1.0), (1.0, 0.3)])
def test_values_and_gradients_are_those_of_log_softmax(
    rows_per_chunk: int, is_compiled: bool, temperature: float, rules_out: bool, uses: tuple[float, float]
) -> None:
    """Each use weighs log-probabilities and entropies in what is differentiated; 0 leaves one out."""
    hidden, weight, labels, is_ruled_out = inputs(torch.float32)
    mask = is_ruled_out if rules_out else None
    upstream = torch.randn(2, TOKENS)
    results = []
    for outputs in (
        chunked_log_probs(
            hidden, weight, labels, temperature, ENDS, mask, rows_per_chunk * 4 * VOCAB, is_compiled=is_compiled
        ),
        plain(hidden, weight, labels, temperature, mask),
    ):
        weighted = [use * (up * out).sum() for use, up, out in zip(uses, upstream, outputs, strict=True) if use]
        results.append([*outputs, *torch.autograd.grad(sum(weighted, torch.zeros(())), [hidden, weight])])
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_that_is_not_positive_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature must be positive"):
        chunked_log_probs(*inputs(torch.float32)[:3], temperature)
    with pytest.raises(ValueError, match="temperature must be positive"):
        token_log_probs(torch.zeros(1, 1, 2), torch.zeros(1, 1, dtype=torch.long), temperature)


def test_bfloat16_is_computed_in_float32_from_the_logits_on() -> None:
    hidden, weight, labels, is_ruled_out = inputs(torch.float32)
    hidden, weight = (x.detach().bfloat16().requires_grad_() for x in (hidden, weight))
    found = chunked_log_probs(hidden, weight, labels, 0.7, ENDS, is_ruled_out, 4 * VOCAB * 8)
    expected = plain(hidden, weight, labels, 0.7, is_ruled_out)
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    upstream = torch.randn(TOKENS)
    ours = torch.autograd.grad((upstream * found[0]).sum(), [hidden, weight])
    theirs = torch.autograd.grad((upstream * expected[0]).sum(), [hidden, weight])
    torch.testing.assert_close(ours, theirs, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("rows_per_chunk", [8, 1000])
def test_a_float32_head_over_bfloat16_is_as_exact_as_a_loop_in_float64(rows_per_chunk: int) -> None:
    hidden, weight, labels, is_ruled_out = inputs(torch.float32)
    hidden, weight = (x.detach().bfloat16().requires_grad_() for x in (hidden, weight))
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    options, chunk_bytes = (0.7, ENDS, is_ruled_out), rows_per_chunk * 4 * VOCAB
    found = chunked_log_probs(hidden, weight, labels, *options, chunk_bytes, in_float32=True)
    tokens = zip(wide[0], labels, is_ruled_out, strict=True)
    rows = [plain(h[None], wide[1], y[None], 0.7, r[None]) for h, y, r in tokens]
    expected = tuple(torch.cat(values) for values in zip(*rows, strict=True))
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=2e-6)
    rounded = chunked_log_probs(hidden, weight, labels, *options)
    assert (rounded[0] - expected[0]).abs().max() > 1e-3
    upstream = torch.randn(2, TOKENS)
    ours = torch.autograd.grad((upstream * torch.stack(found)).sum(), [hidden, weight])
    theirs = torch.autograd.grad((upstream * torch.stack(expected)).sum(), wide)
    for our, their in zip(ours, theirs, strict=True):
        assert our.dtype == torch.bfloat16
        torch.testing.assert_close(our, their.bfloat16(), atol=1e-6, rtol=2**-7)  # one rounding
