"""The policy's distribution over response tokens, exactly the one that the sampler drew from."""

import torch

from grpo_ray.policy.microbatch import MicroBatch
from grpo_ray.policy.model import PolicyModel


def response_logits(
    model: PolicyModel,
    batch: MicroBatch,
    temperature: float,
    min_tokens: int,
    end_token_ids: tuple[int, ...],
) -> torch.Tensor:
    """Compute the float32 logits `[batch, resp, vocab]` that predict `batch.labels`.

    They are divided by the sampling temperature, and end tokens are ruled out before `min_tokens`, because the
    engine samples from this distribution. Only response positions go through the output layer.
    """
    num_labels = batch.labels.shape[1]
    # use_cache=False saves memory, and inputs that restart positions are only correct without a cache.
    output = model(input_ids=batch.input_ids, use_cache=False, logits_to_keep=num_labels + 1)
    logits = output.logits[:, -num_labels - 1 : -1].float()
    if temperature != 1.0:  # with a real vocabulary each copy of the logits takes gigabytes
        logits = logits / temperature
    if min_tokens and end_token_ids:
        too_early = (batch.response_position < min_tokens) & batch.response_mask  # [batch, resp]
        ends = list(end_token_ids)
        # The lowest finite number gives probability 0 as -inf would, but 0 times it is not NaN.
        lowest = torch.finfo(logits.dtype).min
        logits[..., ends] = logits[..., ends].masked_fill(too_early[..., None], lowest)
    return logits
