"""From text to labels, and from logits to log-probabilities, entropies and ratios (all logs are natural)."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8: far outside any clip range, and finite in float32 and bfloat16


def clamped_exp(log_ratio: Tensor) -> Tensor:
    """Return `exp` of log ratios clamped to [-20, 20]; beyond that the gradient is 0. NaN stays NaN."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def check_shape(name: str, tensor: Tensor, policy_log_probs: Tensor) -> None:
    """Refuse a tensor with another shape than the policy's log-probabilities."""
    if tensor.shape != policy_log_probs.shape:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, "
            f"policy_log_probs {tuple(policy_log_probs.shape)}; they must be the same"
        )


def check_rows(name: str, tensor: Tensor, policy_log_probs: Tensor) -> None:
    """Refuse a `[batch]` vector: it would broadcast along the wrong axis whenever batch == seq."""
    if policy_log_probs.ndim != 2:
        raise ValueError(f"log-probabilities must be [batch, seq], got {list(policy_log_probs.shape)}")
    batch, seq = policy_log_probs.shape
    if tensor.shape not in ((batch, 1), (batch, seq)):
        raise ValueError(
            f"{name} must be [batch, 1] = [{batch}, 1] or [batch, seq] = [{batch}, {seq}], "
            f"got {list(tensor.shape)}"
        )


def compute_entropy(logits: Tensor) -> Tensor:
    """Compute the entropy of each next-token distribution, `H = -sum p log p`, in nats.

    Args:
        logits: `[..., vocab]`, unnormalised; -inf means probability 0.

    Returns:
        `[...]`, float32 for half-precision logits.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_probs = logits - logits.logsumexp(dim=-1, keepdim=True)
    finite_log_probs = log_probs.clamp(min=torch.finfo(log_probs.dtype).min)  # 0 * -inf would be NaN
    return -(log_probs.exp() * finite_log_probs).sum(dim=-1)


def token_log_probs(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the log-probability of each label under `softmax(logits / temperature)`.

    One `[batch, seq, vocab]` tensor is kept, the logits or a float32 copy; the backward pass allocates another.

    Args:
        logits: `[batch, seq, vocab]`, of any float dtype.
        labels: `[batch, seq]`, token ids.
        temperature: that of the sampler, above 0.

    Returns:
        `[batch, seq]` float32.

    Raises:
        ValueError: the temperature is not positive, or the shapes differ.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if labels.shape != logits.shape[:-1]:
        raise ValueError(f"labels {tuple(labels.shape)} do not fit logits {tuple(logits.shape)}")
    logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    return _label_log_probs(logits, labels)


class _LabelLogProbs(torch.autograd.Function):
    """Gather minus logsumexp; the gradient is one-hot minus softmax.

    Written by hand because autograd's backward pass takes twice as long and allocates two more such tensors.
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


_label_log_probs: Callable[[Tensor, Tensor], Tensor] = _LabelLogProbs.apply


def get_response_log_probs(
    model: "PreTrainedModel | Callable[..., Any]", input_ids: Tensor, labels: Tensor,
    return_token_entropy: bool, temperature: float = 1.0,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the log-probability that the model assigns to each label, and optionally the entropy there.

    No attention mask is needed: real tokens of a causal model never attend to padding on the right.

    Args:
        model: a transformers model, or any callable from `[batch, seq]` ids to logits
            `[batch, seq, vocab]` (or to an object with `.logits`).
        input_ids: `[batch, seq]`, right-padded.
        labels: `[batch, seq]`, the next token ids.
        return_token_entropy: add `token_entropy`, which is for logging and has no gradient.
        temperature: that of the sampler, above 0; both results are of `softmax(logits / temperature)`.

    Returns:
        `log_probs` `[batch, seq]` float32 and, if requested, `token_entropy` `[batch, seq]`. Prompt and padding
        positions are included; mask them out.
    """
    from transformers import PreTrainedModel  # imported here to keep importing the algorithms fast

    output = model(input_ids, use_cache=False) if isinstance(model, PreTrainedModel) else model(input_ids)
    logits = output.logits if hasattr(output, "logits") else output
    result = {"log_probs": token_log_probs(logits, labels, temperature)}
    if return_token_entropy:
        with torch.no_grad():
            result["token_entropy"] = compute_entropy(logits.float() / temperature)
    return result


def tokenize_prompt_and_output(
    prompts: Sequence[str], outputs: Sequence[str], tokenizer: "PreTrainedTokenizerBase"
) -> dict[str, Tensor]:
    """Tokenise prompts and outputs separately, join each pair, pad on the right and shift by one.

    They are tokenised separately and without special tokens, so that no token straddles the border. Padding is
    the pad token, else the end token, else id 0; the mask never covers it.

    Args:
        outputs: one per prompt.
        tokenizer: needs `encode(text, add_special_tokens=False)`, `pad_token_id` and `eos_token_id`.

    Returns:
        With L the length of the longest prompt plus output, each `[batch, L - 1]`: `input_ids` (all but the
        last column), `labels` (all but the first) and `response_mask` (bool, true at labels of the output).

    Raises:
        ValueError: there are no prompts, or the number of outputs differs.
    """
    if not prompts or len(prompts) != len(outputs):
        raise ValueError(
            f"{len(prompts)} prompts and {len(outputs)} outputs; give at least one, and one output per prompt"
        )
    prompt_ids = [tokenizer.encode(text, add_special_tokens=False) for text in prompts]
    output_ids = [tokenizer.encode(text, add_special_tokens=False) for text in outputs]
    lengths = [len(prompt) + len(output) for prompt, output in zip(prompt_ids, output_ids, strict=True)]
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    padding = next(token_id for token_id in candidates if token_id is not None)
    ids = torch.full((len(prompts), max(lengths)), padding, dtype=torch.long)
    is_response = torch.zeros_like(ids, dtype=torch.bool)
    for row, (prompt, output) in enumerate(zip(prompt_ids, output_ids, strict=True)):
        ids[row, : lengths[row]] = torch.tensor([*prompt, *output], dtype=torch.long)
        is_response[row, len(prompt) : lengths[row]] = True
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "response_mask": is_response[:, 1:]}
