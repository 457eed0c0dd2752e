"""Log-probabilities and entropies by chunks against log_softmax on all logits, with autograd's gradients."""

import pytest
import torch
from torch import Tensor

from grpo_ray.objectives import chunked_log_probs, compute_entropy

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
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_bad_temperature(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature must be positive"):
        chunked_log_probs(*inputs(torch.float32)[:3], temperature)


def test_bfloat16_is_computed_in_float32_from_the_logits_on() -> None:
    hidden, weight, labels, is_ruled_out = (
        x.detach().bfloat16() if x.is_floating_point() else x for x in inputs(torch.float32)
    )
    for tensor in (hidden, weight):
        tensor.requires_grad_()
    found = chunked_log_probs(hidden, weight, labels, 0.7, ENDS, is_ruled_out, 4 * VOCAB * 8)
    expected = plain(hidden, weight, labels, 0.7, is_ruled_out)
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    upstream = torch.randn(TOKENS)
    ours = torch.autograd.grad((upstream * found[0]).sum(), [hidden, weight])
    theirs = torch.autograd.grad((upstream * expected[0]).sum(), [hidden, weight])
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("rows_per_chunk", [8, 1000])
def test_a_float32_head_over_bfloat16_is_as_exact_as_a_loop_in_float64(rows_per_chunk: int) -> None:
    hidden, weight, labels, is_ruled_out = inputs(torch.float32)
    hidden, weight = (x.detach().bfloat16().requires_grad_() for x in (hidden, weight))
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    found = chunked_log_probs(
        hidden, weight, labels, 0.7, ENDS, is_ruled_out, rows_per_chunk * 4 * VOCAB, in_float32=True
    )
    rows = [
        plain(h[None], wide[1], y[None], 0.7, r[None])
        for h, y, r in zip(wide[0], labels, is_ruled_out, strict=True)
    ]
    expected = tuple(torch.cat(values) for values in zip(*rows, strict=True))
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=2e-6)
    rounded = chunked_log_probs(hidden, weight, labels, 0.7, ENDS, is_ruled_out)
    assert (rounded[0] - expected[0]).abs().max() > 1e-3
    upstream = torch.randn(2, TOKENS)
    ours = torch.autograd.grad((upstream * torch.stack(found)).sum(), [hidden, weight])
    theirs = torch.autograd.grad((upstream * torch.stack(expected)).sum(), wide)
    for our, their in zip(ours, theirs, strict=True):
        assert our.dtype == torch.bfloat16
        torch.testing.assert_close(our, their.bfloat16(), atol=1e-6, rtol=2**-7)  # one rounding
