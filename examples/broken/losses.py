"""GRPO-Clip with one fault each: a mask that is off by one, a wrong normalizer, stale old logprobs."""

import torch
from torch import Tensor

from grpo_ray.objectives import RatioInputs, compute_grpo_clip_loss
from grpo_ray.objectives.inputs import Details


def mask_off_by_one(inputs: RatioInputs, cliprange: float = 0.2) -> tuple[Tensor, Details]:
    """Compute GRPO-Clip without the first token of each response, `[batch, seq]`.

    Logprobs stand one place before the token that they predict. A mask that is made for tokens and applied to
    logprobs without that shift takes in the place behind the response, and leaves out its first token.
    """
    loss, details = _grpo_clip(inputs, inputs.old_log_probs, cliprange)
    is_kept = torch.ones_like(inputs.mask)
    is_kept[:, 0] = False
    return loss * is_kept, details


def mean_per_micro_batch(
    inputs: RatioInputs, num_responses: int, cliprange: float = 0.2
) -> tuple[Tensor, Details]:
    """Compute GRPO-Clip as if each micro-batch were the whole batch, `[batch, seq]`.

    Each micro-batch's loss is the mean over its own responses, and the gradients of the micro-batches are
    summed: the gradient grows with their number, and a response counts more in a small one.

    Args:
        num_responses: of the whole batch, by which the Learner divides.
    """
    loss, details = _grpo_clip(inputs, inputs.old_log_probs, cliprange)
    return loss * (num_responses / len(loss)), details


class StaleOldLogProbs:
    """GRPO-Clip with a cache of old logprobs that is filled once and never cleared."""

    def __init__(self) -> None:
        self._kept: Tensor | None = None

    def __call__(self, inputs: RatioInputs, cliprange: float = 0.2) -> tuple[Tensor, Details]:
        """Compute the loss `[batch, seq]` with the ratio to the first batch's logprobs, row by row."""
        if self._kept is None or len(self._kept) < len(inputs.mask):
            self._kept = inputs.old_log_probs.detach().clone()
        rows, columns = inputs.mask.shape
        kept = torch.zeros_like(inputs.old_log_probs)
        width = min(columns, self._kept.shape[1])
        kept[:, :width] = self._kept[:rows, :width]
        return _grpo_clip(inputs, kept, cliprange)


_stale = StaleOldLogProbs()


def stale_old_log_probs(inputs: RatioInputs, cliprange: float = 0.2) -> tuple[Tensor, Details]:
    """Compute GRPO-Clip with the ratio to the old logprobs of an earlier batch, `[batch, seq]`."""
    return _stale(inputs, cliprange)


def _grpo_clip(inputs: RatioInputs, old_log_probs: Tensor, cliprange: float) -> tuple[Tensor, Details]:
    return compute_grpo_clip_loss(inputs.advantages, inputs.policy_log_probs, old_log_probs, cliprange)
