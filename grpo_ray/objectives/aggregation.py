"""From per-token values to one scalar, under a mask; and the gradient that a loss then has at every token.

Masked-out values are removed by selection (`torch.where`), not multiplied by 0: a NaN or inf in the padding
reaches neither the result nor the gradient.
"""

from typing import get_args

import torch
from torch import Tensor

from grpo_ray.config.losses import Aggregation


def masked_mean(tensor: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Average the elements where mask is true, over `dim` or over everything.

    Args:
        tensor: any shape.
        mask: the same shape, bool or 0/1.

    Returns:
        The tensor's shape without `dim`. A slice with an empty mask gives 0/0 = NaN.
    """
    mask = mask.bool()
    return _masked_sum(tensor, mask, dim) / (mask.sum() if dim is None else mask.sum(dim))


def masked_normalize(
    tensor: Tensor, mask: Tensor, dim: int | None = None, constant_normalizer: float = 1.0
) -> Tensor:
    """Sum the elements where mask is true, over `dim` or over everything, and divide by a constant.

    With the maximum response length as the constant this is Dr. GRPO's length normalisation
    (arXiv:2503.20783, Section 3.2): each token has the same weight in a short response and in a long one.

    Args:
        tensor: any shape.
        mask: the same shape, bool or 0/1.

    Returns:
        The tensor's shape without `dim`; 0 where the mask is empty.
    """
    return _masked_sum(tensor, mask.bool(), dim) / constant_normalizer


def aggregate_loss(
    per_token_loss: Tensor, mask: Tensor, aggregation: Aggregation, denominator: float,
    row_tokens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Reduce per-token losses to this micro-batch's share of the batch's loss.

    The denominator counts the WHOLE batch, over all micro-batches and ranks (see `loss_denominator`), never
    just the sequences in this call. Results of several calls therefore add up: however a batch is split into
    micro-batches, its summed loss and gradient stay the same.

    - `sequence_mean`: each response's mean, summed / sequences (GRPO, arXiv:2402.03300, Eq. 3).
    - `token_mean`: sum over tokens / tokens (DAPO, arXiv:2503.14476, Section 3.3).
    - `constant`: sum over tokens / (sequences * maximum response length) (Dr. GRPO, arXiv:2503.20783,
      Section 3.2).
    - `sequence_sum`: sum over tokens / sequences (RLOO, arXiv:2402.14740; LUSPO, arXiv:2602.05261).
    - `prompt_mean`: each prompt's mean over all tokens of its responses, summed / prompts (DAPO, Eq. 8; CISPO,
      arXiv:2506.13585, Eq. 4).

    Args:
        per_token_loss: `[batch, seq]`.
        mask: `[batch, seq]`, bool or 0/1; a row without tokens contributes 0.
        row_tokens: `[batch]`, the number of tokens that each row's mean is over, if a response has several rows
            here or in other calls (an episode with branches); None: that of the row itself. For `prompt_mean`
            the tokens of all its prompt's responses.

    Raises:
        ValueError: the denominator is not positive, the aggregation unknown, or `prompt_mean` lacks row_tokens.
    """
    if not denominator > 0:
        raise ValueError(f"denominator must be positive, got {denominator}")
    if aggregation == "prompt_mean" and row_tokens is None:
        raise ValueError("prompt_mean needs row_tokens: the tokens of each row's prompt")
    if row_tokens is not None and row_tokens.shape != mask.shape[:1]:
        raise ValueError(f"row_tokens must be [batch] = [{len(mask)}], got {list(row_tokens.shape)}")
    if aggregation in ("sequence_mean", "prompt_mean"):
        mask = mask.bool()
        num_tokens = mask.sum(dim=1) if row_tokens is None else row_tokens
        num_tokens = num_tokens.clamp(min=1)  # [batch]; 1 keeps an empty row at 0/1
        return (_masked_sum(per_token_loss, mask, dim=1) / num_tokens).sum() / denominator
    _check_known(aggregation)
    return masked_normalize(per_token_loss, mask, constant_normalizer=denominator)


def loss_denominator(
    aggregation: Aggregation, num_sequences: int, num_tokens: int, max_tokens: int | None, num_prompts: int = 0
) -> float:
    """Return the denominator of `aggregate_loss` for one batch.

    Args:
        num_sequences: responses in the whole batch; an episode counts as one, whatever its turns and branches.
        num_tokens: response tokens in the whole batch that are trained on.
        max_tokens: the maximum response length in tokens; in episodes that of one turn, so that the constant
            does not depend on their number. None: not known, and needed for `constant` alone.
        num_prompts: prompts in the whole batch, for `prompt_mean` alone.

    Raises:
        ValueError: the aggregation is unknown, or `constant` lacks max_tokens.
    """
    _check_known(aggregation)
    if aggregation == "constant" and max_tokens is None:
        raise ValueError(
            "the aggregation constant divides by the maximum response length, which a batch does not contain; "
            "give denominator=loss_denominator('constant', num_sequences, num_tokens, max_tokens)"
        )
    of_constant = num_sequences * (max_tokens or 0)
    counts = {"token_mean": num_tokens, "prompt_mean": num_prompts, "constant": of_constant}
    return float(counts.get(aggregation, num_sequences))


def _masked_sum(tensor: Tensor, mask: Tensor, dim: int | None) -> Tensor:
    if mask.shape != tensor.shape:  # one that broadcasts would count each of its tokens several times
        raise ValueError(f"the mask has shape {tuple(mask.shape)}, the tensor {tuple(tensor.shape)}")
    kept = torch.where(mask, tensor, torch.zeros_like(tensor))
    return kept.sum() if dim is None else kept.sum(dim)


def _check_known(aggregation: str) -> None:
    if aggregation not in get_args(Aggregation):
        raise ValueError(f"unknown aggregation {aggregation!r}; allowed: {', '.join(get_args(Aggregation))}")


def gradient_sums(
    gradient: Tensor, mask: Tensor, advantages: Tensor, aggregation: Aggregation, denominator: float,
    row_tokens: Tensor | None = None, weights: Tensor | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Compare d loss / d logprob after a backward pass with REINFORCE's, `-A` times the aggregation's weight.

    A wrong normalizer changes the sum of the sizes, and a wrong mask leaves tokens without gradient, whatever
    function computed the loss. Adam hides a wrong factor from every other metric but the gradient's norm.

    Args:
        gradient: `[batch, seq]`, of the micro-batch's loss with respect to the policy's log-probabilities.
        mask: bool `[batch, seq]`, the sampled tokens.
        advantages: `[batch, 1]` or `[batch, seq]`.
        aggregation, denominator, row_tokens: as for `aggregate_loss`.
        weights: `[batch, seq]` or `[batch, 1]`, factors of the token losses; None: 1.

    Returns:
        Scalars to sum over micro-batches: `gradient_sum` (of the sizes at tokens with an advantage and a weight
        other than 0), `plain_gradient_sum` (REINFORCE's), `num_gradients` (those tokens), and
        `num_without_gradient` of them.
    """
    sizes = advantages.abs().expand_as(mask).float()
    if weights is not None:
        sizes = sizes * weights
    has_gradient = mask & (sizes != 0)
    return {
        "gradient_sum": gradient.abs().masked_fill(~has_gradient, 0.0).sum(),
        "plain_gradient_sum": aggregate_loss(sizes, mask, aggregation, denominator, row_tokens),
        "num_gradients": has_gradient.sum(),
        "num_without_gradient": (has_gradient & (gradient == 0)).sum(),
    }
