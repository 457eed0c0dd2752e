"""A short supervised run that gives a tiny model habits for GRPO to choose between."""

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerBase

from grpo_ray.config.model import WarmupConfig
from grpo_ray.models.policy_model import PolicyModel

IGNORED = -100  # label that cross_entropy skips


def warm_up(
    model: PolicyModel,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[tuple[str, str]],
    config: WarmupConfig,
    progress: Callable[[int, int, float], None] | None = None,
) -> None:
    """Train `model` in place on (prompt, response) pairs; the loss counts response tokens only.

    Step k uses pairs `[k * batch_size, (k + 1) * batch_size)`, starting over at the end.
    """
    torch.set_num_threads(config.num_threads)
    examples = [_encode(tokenizer, prompt, response) for prompt, response in pairs]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    ramp = max(1, config.num_steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / ramp, (config.num_steps - step) / (config.num_steps - ramp + 1)),
    )
    model.train()
    for step in range(config.num_steps):
        start = step * config.batch_size
        batch = [examples[i % len(examples)] for i in range(start, start + config.batch_size)]
        input_ids, labels = _pad(batch, tokenizer.pad_token_id)
        logits = model(input_ids=input_ids, use_cache=False).logits  # [batch, seq, vocab]
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if progress is not None:
            progress(step + 1, config.num_steps, loss.item())
    model.eval()


def _encode(tokenizer: PreTrainedTokenizerBase, prompt: str, response: str) -> tuple[list[int], int]:
    """Return the token ids of prompt, response and end token, and the prompt's length.

    Both are encoded separately, as in training, where the prompt's ids are fixed before sampling.
    """
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    response_ids = tokenizer(response, add_special_tokens=False)["input_ids"]
    return [*prompt_ids, *response_ids, tokenizer.eos_token_id], len(prompt_ids)


def _pad(batch: Sequence[tuple[list[int], int]], pad_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return right-padded `input_ids` and `labels`, both `[batch, seq]`; padding comes after every label."""
    length = max(len(ids) for ids, _ in batch)
    input_ids = torch.full((len(batch), length), pad_token_id)
    labels = torch.full((len(batch), length), IGNORED)
    for row, (ids, prompt_length) in enumerate(batch):
        input_ids[row, : len(ids)] = torch.tensor(ids)
        labels[row, prompt_length : len(ids)] = torch.tensor(ids[prompt_length:])
    return input_ids, labels
