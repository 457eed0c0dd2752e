"""Log-probabilities and entropies from hidden states, without a tensor `[tokens, vocab]`.

With a vocabulary of 151,936, one float32 copy of the logits of 8,192 tokens takes 4.6 GiB. Here the output
layer is applied to a chunk of positions at a time, and the backward pass computes each chunk again, unless
there is one alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

CHUNK_BYTES = 2**28
"""Size of one chunk's float32 logits, in bytes; forward and backward hold about two and a half of them."""

RULED_OUT = torch.finfo(torch.float32).min / 2
"""The logit of a token that the sampler could not draw: its probability is 0, and 0 times it is not NaN."""


def chunked_log_probs(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float = 1.0, ruled_out: Sequence[int] = (),
    is_ruled_out: Tensor | None = None, chunk_bytes: int = CHUNK_BYTES, in_float32: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return `log softmax(hidden @ weight.T / temperature)` at the labels, and each distribution's entropy.

    Both are differentiable in `hidden` and `weight`: with p the distribution, H its entropy and z its logits,
    `d log p_y / dz = 1_y - p` and `dH / dz = -p (log p + H)`.

    Args:
        hidden: `[tokens, width]`, the states that the output layer is applied to.
        weight: `[vocab, width]`, of the same dtype.
        labels: `[tokens]`, token ids.
        temperature: that of the sampler, above 0.
        ruled_out: token ids that the sampler could not draw at the positions of `is_ruled_out`.
        is_ruled_out: `[tokens]` bool.
        chunk_bytes: size of the float32 logits of the positions that are computed together.
        in_float32: compute the products of forward and backward pass in float32, whatever the dtype of
            `hidden` and `weight`, which is that of their gradients.

    Returns:
        Log-probabilities and entropies, `[tokens]` float32, in nats.

    Raises:
        ValueError: the temperature is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    layer = _OutputLayer(weight.shape[0], temperature, tuple(ruled_out), chunk_bytes, in_float32)
    return _apply(hidden, weight, labels, is_ruled_out, layer)


class _OutputLayer:
    """The distributions of a chunk of positions."""

    def __init__(
        self, vocab: int, temperature: float, ruled_out: tuple[int, ...], chunk_bytes: int, in_float32: bool
    ) -> None:
        self._temperature, self._ruled_out, self._in_float32 = temperature, ruled_out, in_float32
        self._rows = max(1, chunk_bytes // (4 * vocab))

    def chunks(self, num_tokens: int) -> list[slice]:
        return [slice(first, first + self._rows) for first in range(0, num_tokens, self._rows)]

    def operand(self, weight: Tensor) -> Tensor:
        """Return the weight in the dtype of the products."""
        return weight.float() if self._in_float32 else weight

    def logits(self, hidden: Tensor, weight: Tensor, is_ruled_out: Tensor | None) -> Tensor:
        """Return a chunk's logits, `[rows, vocab]` float32."""
        logits = linear(hidden.to(weight.dtype), weight).float()
        if self._temperature != 1.0:
            logits /= self._temperature
        if is_ruled_out is not None:
            for token in self._ruled_out:  # an index of several would be copied to the GPU, which waits for it
                logits[:, token].masked_fill_(is_ruled_out, RULED_OUT)
        return logits

    def scale_gradient(self, logits_grad: Tensor) -> Tensor:
        return logits_grad if self._temperature == 1.0 else logits_grad.div_(self._temperature)


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, is_ruled_out: Tensor | None,
        layer: _OutputLayer,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        normaliser = torch.empty(len(labels), dtype=torch.float32, device=hidden.device)
        log_probs, entropy = torch.empty_like(normaliser), torch.empty_like(normaliser)
        chunks, operand = layer.chunks(len(labels)), layer.operand(weight)
        for rows in chunks:
            logits = layer.logits(hidden[rows], operand, None if is_ruled_out is None else is_ruled_out[rows])
            normaliser[rows] = logits.logsumexp(-1)
            all_log_probs = logits.sub_(normaliser[rows, None])
            log_probs[rows] = all_log_probs.gather(-1, labels[rows, None])[:, 0]
            entropy[rows] = -_row_products(all_log_probs.exp(), all_log_probs)
        only = all_log_probs if len(chunks) == 1 else None  # no larger than what the backward pass holds
        ctx.save_for_backward(hidden, weight, labels, is_ruled_out, normaliser, entropy, only)
        ctx.layer = layer
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, log_probs_grad: Tensor | None, entropy_grad: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, is_ruled_out, normaliser, entropy, only = ctx.saved_tensors
        operand = ctx.layer.operand(weight)
        hidden_grad = torch.empty_like(hidden, dtype=operand.dtype)
        # None: the output layer is frozen, as under an adapter.
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        if log_probs_grad is None:
            log_probs_grad = torch.zeros_like(normaliser)
        for rows in ctx.layer.chunks(len(labels)):
            all_log_probs = only
            if all_log_probs is None:
                ruled_out = None if is_ruled_out is None else is_ruled_out[rows]
                all_log_probs = ctx.layer.logits(hidden[rows], operand, ruled_out)
                all_log_probs.sub_(normaliser[rows, None])
            grad = _logits_grad(all_log_probs, labels[rows], log_probs_grad[rows])
            if entropy_grad is not None:
                grad -= _entropy_part(all_log_probs, entropy[rows], entropy_grad[rows])
            grad = ctx.layer.scale_gradient(grad).to(operand.dtype)
            torch.mm(grad, operand, out=hidden_grad[rows])
            if weight_grad is None:
                continue
            if operand.dtype == torch.float32:
                weight_grad.addmm_(grad.T, hidden[rows].float())
            else:
                weight_grad += grad.T @ hidden[rows]
        del operand  # memory for the cast
        if weight_grad is not None:
            weight_grad = weight_grad.to(weight.dtype)
        return hidden_grad.to(hidden.dtype), weight_grad, None, None, None


_apply: Callable[..., tuple[Tensor, Tensor]] = _ChunkedLogProbs.apply


def _logits_grad(all_log_probs: Tensor, labels: Tensor, log_probs_grad: Tensor) -> Tensor:
    """Return the gradient of a chunk's logits through the log-probabilities, `[rows, vocab]`."""
    grad = all_log_probs.exp().mul_(-log_probs_grad[:, None])
    return grad.scatter_add_(-1, labels[:, None], log_probs_grad[:, None])


def _entropy_part(all_log_probs: Tensor, entropy: Tensor, entropy_grad: Tensor) -> Tensor:
    """Return the negative gradient of a chunk's logits through the entropies, `[rows, vocab]`."""
    return all_log_probs.exp().mul_(entropy_grad[:, None]).mul_(all_log_probs + entropy[:, None])


def _row_products(first: Tensor, second: Tensor) -> Tensor:
    """Return the inner product of each row with its counterpart, `[rows]`, with no temporary of their size."""
    return torch.bmm(first[:, None, :], second[:, :, None])[:, 0, 0]
