"""Sequences to train on, cut into padded micro-batches of bounded size.

Padding is on the right, where causal attention never reaches it, so no mask is needed. Sorting by length
keeps the waste to a few percent.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from grpo_ray.types import ScoredGroup


@dataclass(frozen=True)
class TrainSequence:
    """One prompt and response; the arrays are `[response_tokens]`."""

    prompt_token_ids: tuple[int, ...]
    response_token_ids: np.ndarray
    behaviour_logprobs: np.ndarray
    advantage: float
    has_signal: bool = True  # false if all advantages of its group are 0
    proximal_logprobs: np.ndarray | None = None
    reference_logprobs: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.prompt_token_ids) + len(self.response_token_ids)


@dataclass(frozen=True)
class MicroBatch:
    """Padded tensors. `seq` covers prompt and response; `resp` starts where the shortest prompt ends.

    `labels[:, j]` is the token at position `first_label + j`, predicted by the logits one position earlier.
    """

    input_ids: torch.Tensor  # int64 [batch, seq]
    labels: torch.Tensor  # int64 [batch, resp]
    response_mask: torch.Tensor  # bool [batch, resp]
    response_position: torch.Tensor  # int64 [batch, resp]: 0 at a response's first token, -1 outside
    behaviour_logprobs: torch.Tensor  # float32 [batch, resp]
    advantages: torch.Tensor  # float32 [batch, 1]
    proximal_logprobs: torch.Tensor | None = None  # float32 [batch, resp]
    reference_logprobs: torch.Tensor | None = None  # float32 [batch, resp]

    def to(self, device: torch.device) -> "MicroBatch":
        tensors = {name: tensor for name, tensor in vars(self).items() if tensor is not None}
        return MicroBatch(**{name: tensor.to(device) for name, tensor in tensors.items()})


def sequences_of(groups: Sequence[ScoredGroup], mask_truncated: bool = False) -> list[TrainSequence]:
    """Return every completion of the groups, in order; `mask_truncated` omits those that were cut off."""
    return [
        TrainSequence(group.rollout.item.prompt_token_ids, c.token_ids, c.logprobs, float(a), group.has_signal)
        for group in groups
        for c, a in zip(group.rollout.completions, group.advantages, strict=True)
        if not (mask_truncated and c.is_truncated)
    ]


def minibatches(
    sequences: Sequence[TrainSequence], size: int | None, num_epochs: int, seed: str
) -> list[list[TrainSequence]]:
    """Shuffle each epoch and split it into minibatches of `size`; return those of all epochs, in order.

    If `size` does not divide the sequences, all minibatches are a little smaller, so that no remainder of a few
    sequences gets an update of its own. None means one minibatch per epoch, in the given order.
    """
    if size is None or size >= len(sequences):
        return [list(sequences)] * num_epochs
    updates = []
    for epoch in range(num_epochs):
        shuffled = list(sequences)
        random.Random(f"{seed}/{epoch}").shuffle(shuffled)
        num_updates = -(-len(shuffled) // size)
        updates += [shuffled[first::num_updates] for first in range(num_updates)]
    return updates


def micro_batches(
    sequences: Sequence[TrainSequence], max_tokens: int
) -> Iterator[tuple[list[int], MicroBatch]]:
    """Split the sequences, longest first, so that `rows * longest <= max_tokens` (with at least one row).

    Yields:
        The indices of a micro-batch's sequences, and the micro-batch.
    """
    pending = sorted(range(len(sequences)), key=lambda index: len(sequences[index]), reverse=True)
    while pending:
        rows = max(1, max_tokens // len(sequences[pending[0]]))
        yield pending[:rows], collate([sequences[index] for index in pending[:rows]])
        pending = pending[rows:]


def collate(sequences: Sequence[TrainSequence]) -> MicroBatch:
    """Pad the sequences to one micro-batch, in the given order."""
    batch, length = len(sequences), max(len(s) for s in sequences)
    first_label = min(len(s.prompt_token_ids) for s in sequences)
    input_ids = np.zeros((batch, length), dtype=np.int64)
    position = np.full((batch, length), -1, dtype=np.int64)
    for row, s in enumerate(sequences):
        start, end = len(s.prompt_token_ids), len(s)
        input_ids[row, :start] = s.prompt_token_ids
        input_ids[row, start:end] = s.response_token_ids
        position[row, start:end] = np.arange(end - start)
    positions = torch.from_numpy(position[:, first_label:])

    def per_token(rows: list[np.ndarray | None]) -> torch.Tensor | None:
        if rows[0] is None:
            return None
        padded = np.zeros((batch, length), dtype=np.float32)
        for row, (s, values) in enumerate(zip(sequences, rows, strict=True)):
            padded[row, len(s.prompt_token_ids) : len(s)] = values
        return torch.from_numpy(padded[:, first_label:])

    behaviour = per_token([s.behaviour_logprobs for s in sequences])
    assert behaviour is not None
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        labels=torch.from_numpy(input_ids[:, first_label:]),
        response_mask=positions >= 0,
        response_position=positions,
        behaviour_logprobs=behaviour,
        advantages=torch.tensor([[s.advantage] for s in sequences]),
        proximal_logprobs=per_token([s.proximal_logprobs for s in sequences]),
        reference_logprobs=per_token([s.reference_logprobs for s in sequences]),
    )
