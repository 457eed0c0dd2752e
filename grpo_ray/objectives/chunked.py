"""Log-probabilities and entropies from hidden states, without a tensor `[tokens, vocab]`.

With a vocabulary of 151,936, one float32 copy of the logits of 8,192 tokens takes 4.6 GiB. Here the output
layer is applied to a chunk of positions at a time, and the backward pass computes each of several again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

CHUNK_BYTES = 2**28
"""Size of one chunk's float32 logits, in bytes; forward and backward hold about two and a half of them."""
COMPILED_CHUNK_BYTES = 2**30
"""The same for a compiled layer on a GPU, which holds less: each chunk rewrites the weights' gradient."""

RULED_OUT = torch.finfo(torch.float32).min / 2
"""The logit of a token that the sampler could not draw: its probability is 0, and 0 times it is not NaN."""


def chunked_log_probs(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float = 1.0, ruled_out: Sequence[int] = (),
    is_ruled_out: Tensor | None = None, chunk_bytes: int | None = None, in_float32: bool = False,
    is_compiled: bool = False,
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
        chunk_bytes: size of the float32 logits that are computed together; by default one of the two above.
        in_float32: compute the products of forward and backward pass in float32, whatever the dtype of
            `hidden` and `weight`, which is that of their gradients.
        is_compiled: compile what is computed between the products, so that it reads each logit about twice.

    Returns:
        Log-probabilities and entropies, `[tokens]` float32, in nats.

    Raises:
        ValueError: the temperature is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if chunk_bytes is None:
        chunk_bytes = COMPILED_CHUNK_BYTES if weight.is_cuda and is_compiled else CHUNK_BYTES
    rows = max(1, chunk_bytes // (4 * weight.shape[0]))
    layer = _OutputLayer(rows, temperature, tuple(ruled_out), in_float32, is_compiled)
    return _apply(hidden, weight, labels, is_ruled_out, layer)


@dataclass(frozen=True)
class _OutputLayer:
    """The distributions of a chunk of positions."""

    rows: int
    temperature: float
    ruled_out: tuple[int, ...]
    in_float32: bool
    is_compiled: bool

    def chunks(self, num_tokens: int) -> list[slice]:
        return [slice(first, first + self.rows) for first in range(0, num_tokens, self.rows)]

    def operand(self, weight: Tensor) -> Tensor:
        """Return the weight in the dtype of the products."""
        return weight.float() if self.in_float32 else weight

    def logits(self, products: Tensor, is_ruled_out: Tensor | None) -> Tensor:
        """Return a chunk's logits, `[rows, vocab]` float32, of the layer's products, which they replace."""
        logits = products.float()
        if self.temperature != 1.0:
            logits /= self.temperature
        if is_ruled_out is not None:
            for token in self.ruled_out:  # an index of several would be copied to the GPU, which waits for it
                logits[:, token].masked_fill_(is_ruled_out, RULED_OUT)
        return logits

    def summary(
        self, products: Tensor, labels: Tensor, is_ruled_out: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return normalisers, log-probabilities at the labels, entropies, `[rows]`, and all log-probabilities.

        The last are None if compiled, so that they are never written.
        """
        logits = self.logits(products, is_ruled_out)
        del products
        normaliser = logits.logsumexp(-1)
        all_log_probs = logits.sub_(normaliser[:, None])
        log_probs = all_log_probs.gather(-1, labels[:, None])[:, 0]
        entropy = -all_log_probs.exp().mul_(all_log_probs).sum(-1)
        return normaliser, log_probs, entropy, None if self.is_compiled else all_log_probs

    def gradient(
        self, all_log_probs: Tensor, labels: Tensor, entropy: Tensor, grads: tuple[Tensor, Tensor | None],
        dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        """Return the gradient of a chunk's products, `[rows, vocab]`; `grads`: of log-probs and entropies."""
        log_probs_grad, entropy_grad = grads
        grad = all_log_probs.exp().mul_(-log_probs_grad[:, None])
        if entropy_grad is not None:
            grad -= all_log_probs.exp().mul_(entropy_grad[:, None]).mul_(all_log_probs + entropy[:, None])
        at_labels = grad.gather(-1, labels[:, None]) + log_probs_grad[:, None]
        if self.temperature != 1.0:
            grad, at_labels = grad.div_(self.temperature), at_labels / self.temperature
        return grad.scatter_(-1, labels[:, None], at_labels).to(dtype)  # of bfloat16 a CPU would copy all

    def gradient_again(
        self, products: Tensor, is_ruled_out: Tensor | None, normaliser: Tensor, labels: Tensor, *rest: Any
    ) -> Tensor:
        """Return `gradient` where the log-probabilities were not kept."""
        all_log_probs = self.logits(products, is_ruled_out).sub_(normaliser[:, None])
        del products
        return self.gradient(all_log_probs, labels, *rest)


@cache
def _ready(method: Callable[..., Any], is_compiled: bool) -> Callable[..., Any]:
    """Return the method, compiled once if it shall be."""
    return torch.compile(method, dynamic=True) if is_compiled else method


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, is_ruled_out: Tensor | None,
        layer: _OutputLayer,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        normaliser = torch.empty(len(labels), dtype=torch.float32, device=hidden.device)
        log_probs, entropy = torch.empty_like(normaliser), torch.empty_like(normaliser)
        chunks, operand = layer.chunks(len(labels)), layer.operand(weight)
        summary = _ready(_OutputLayer.summary, layer.is_compiled)
        for rows in chunks:
            ruled_out = None if is_ruled_out is None else is_ruled_out[rows]
            # In one expression, here and below, so that the callee can free the products.
            found = summary(layer, linear(hidden[rows].to(operand.dtype), operand), labels[rows], ruled_out)
            normaliser[rows], log_probs[rows], entropy[rows], all_log_probs = found
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
        layer: _OutputLayer = ctx.layer
        operand = layer.operand(weight)
        hidden_grad = torch.empty_like(hidden, dtype=operand.dtype)
        # None: the output layer is frozen, as under an adapter.
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        if log_probs_grad is None:
            log_probs_grad = torch.zeros_like(normaliser)
        gradient_again = _ready(_OutputLayer.gradient_again, layer.is_compiled)
        for rows in layer.chunks(len(labels)):
            grads = log_probs_grad[rows], None if entropy_grad is None else entropy_grad[rows]
            if only is not None:
                grad = layer.gradient(only, labels[rows], entropy[rows], grads, operand.dtype)
            else:
                ruled_out = None if is_ruled_out is None else is_ruled_out[rows]
                grad = gradient_again(  # without `*`: its tuple would keep the products
                    layer, linear(hidden[rows].to(operand.dtype), operand), ruled_out, normaliser[rows],
                    labels[rows], entropy[rows], grads, operand.dtype,
                )  # fmt: skip
            torch.mm(grad, operand, out=hidden_grad[rows])
            if weight_grad is not None and operand.dtype == torch.float32:
                weight_grad.addmm_(grad.T, hidden[rows].float())
            elif weight_grad is not None:
                weight_grad += grad.T @ hidden[rows]
            del grad  # memory for the next chunk's
        del operand  # memory for the cast
        if weight_grad is not None:
            weight_grad = weight_grad.to(weight.dtype)
        return hidden_grad.to(hidden.dtype), weight_grad, None, None, None


_apply: Callable[..., tuple[Tensor, Tensor]] = _ChunkedLogProbs.apply
