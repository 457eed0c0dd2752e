"""From text to labels, and from logits to log-probabilities and entropies (all in nats)."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def compute_entropy(logits: Tensor) -> Tensor:
    """Entropy of each next-token distribution, `H = -sum p log p`, in nats.

    Args:
        logits: `[..., vocab]`, unnormalised; -inf is a token of probability 0.

    Returns:
        `[...]`, in float32 for half-precision logits.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_probs = logits - logits.logsumexp(dim=-1, keepdim=True)
    finite_log_probs = log_probs.clamp(min=torch.finfo(log_probs.dtype).min)  # 0 * -inf would be NaN
    return -(log_probs.exp() * finite_log_probs).sum(dim=-1)


def token_log_probs(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of each label under `softmax(logits / temperature)`.

    No `[batch, seq, vocab]` tensor is kept for the backward pass, which makes one: the gradient.

    Args:
        logits: `[batch, seq, vocab]`, of any float dtype.
        labels: `[batch, seq]`, token ids.
        temperature: the sampler's, above 0.

    Returns:
        `[batch, seq]` float32.

    Raises:
        ValueError: the temperature is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    log_probs: Tensor = _LabelLogProbs.apply(logits, labels)
    return log_probs


class _LabelLogProbs(torch.autograd.Function):
    """Gather minus logsumexp; its gradient is one-hot minus softmax.

    By hand, because autograd's backward pass takes twice as long and makes two more tensors of this size.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        labels = labels.unsqueeze(-1)
        normaliser = logits.logsumexp(dim=-1, keepdim=True)
        ctx.save_for_backward(logits, labels, normaliser)
        return (logits.gather(-1, labels) - normaliser).squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, labels, normaliser = ctx.saved_tensors
        grad = grad.unsqueeze(-1)
        logits_grad = (logits - normaliser).exp_().mul_(-grad)
        return logits_grad.scatter_add_(-1, labels, grad), None


def get_response_log_probs(
    model: "PreTrainedModel | Callable[..., Any]",
    input_ids: Tensor,
    labels: Tensor,
    return_token_entropy: bool,
) -> dict[str, Tensor]:
    """Log-probability the model gives each label, and on request the entropy at each position.

    No attention mask is needed: with padding on the right, a causal model's real tokens never see it.

    Args:
        model: a transformers model, or any callable from `[batch, seq]` ids to logits
            `[batch, seq, vocab]` (or to an object with `.logits`).
        input_ids: `[batch, seq]`, right-padded.
        labels: `[batch, seq]`, the ids that follow.
        return_token_entropy: add `token_entropy`; it is for logging and carries no gradient.

    Returns:
        `log_probs` `[batch, seq]` float32 and, if asked for, `token_entropy` `[batch, seq]`. Prompt and
        padding positions are included; mask them out.
    """
    output = model(input_ids, use_cache=False) if _is_transformers_model(model) else model(input_ids)
    logits = output.logits if hasattr(output, "logits") else output
    result = {"log_probs": token_log_probs(logits, labels)}
    if return_token_entropy:
        with torch.no_grad():
            result["token_entropy"] = compute_entropy(logits)
    return result


def tokenize_prompt_and_output(
    prompts: Sequence[str], outputs: Sequence[str], tokenizer: "PreTrainedTokenizerBase"
) -> dict[str, Tensor]:
    """Tokenise prompts and outputs apart, join each pair, pad on the right and shift by one.

    Apart, and without special tokens, so that no token straddles the border between the two. Padding is the
    pad token, else the end token, else id 0: the mask never covers it.

    Args:
        prompts: batch strings.
        outputs: batch strings.
        tokenizer: needs `encode(text, add_special_tokens=False)`, `pad_token_id` and `eos_token_id`.

    Returns:
        With L the longest prompt and output together, each `[batch, L - 1]`: `input_ids` (all but the last
        column), `labels` (all but the first) and `response_mask` (bool, true where the label is a token of
        the output).

    Raises:
        ValueError: there are no prompts, or not as many outputs.
    """
    if not prompts or len(prompts) != len(outputs):
        raise ValueError(
            f"{len(prompts)} prompts and {len(outputs)} outputs; give one or more, one output each"
        )
    prompt_ids = [tokenizer.encode(text, add_special_tokens=False) for text in prompts]
    output_ids = [tokenizer.encode(text, add_special_tokens=False) for text in outputs]
    lengths = [len(prompt) + len(output) for prompt, output in zip(prompt_ids, output_ids, strict=True)]
    ids = torch.full((len(prompts), max(lengths)), _pad_token_id(tokenizer), dtype=torch.long)
    is_response = torch.zeros_like(ids, dtype=torch.bool)
    for row, (prompt, output) in enumerate(zip(prompt_ids, output_ids, strict=True)):
        ids[row, : lengths[row]] = torch.tensor([*prompt, *output], dtype=torch.long)
        is_response[row, len(prompt) : lengths[row]] = True
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "response_mask": is_response[:, 1:]}


def _pad_token_id(tokenizer: "PreTrainedTokenizerBase") -> int:
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(token_id for token_id in candidates if token_id is not None)


def _is_transformers_model(model: object) -> bool:
    from transformers import PreTrainedModel  # here, so that importing the algorithms stays quick

    return isinstance(model, PreTrainedModel)
