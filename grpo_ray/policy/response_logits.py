"""The policy's distribution over response tokens, exactly as the sampler drew from it."""

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
    """float32 logits `[batch, resp, vocab]` that predict `batch.labels`.

    Divided by the sampling temperature, and with the end tokens ruled out before `min_tokens`, because
    that is what the engine samples from. Only response positions go through the output layer.
    """
    num_labels = batch.labels.shape[1]
    # use_cache=False: it saves memory, and position-restarting inputs are only right without a cache.
    output = model(input_ids=batch.input_ids, use_cache=False, logits_to_keep=num_labels + 1)
    logits = output.logits[:, -num_labels - 1 : -1].float()
    if temperature != 1.0:  # each copy of the logits of a real vocabulary is gigabytes
        logits = logits / temperature
    if min_tokens and end_token_ids:
        too_early = (batch.response_position < min_tokens) & batch.response_mask  # [batch, resp]
        ends = list(end_token_ids)
        # The smallest finite number: its probability is 0 as well, and 0 times it is not NaN.
        lowest = torch.finfo(logits.dtype).min
        logits[..., ends] = logits[..., ends].masked_fill(too_early[..., None], lowest)
    return logits
