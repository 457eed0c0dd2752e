"""Sequences to train on, cut into padded micro-batches of bounded size.

Padding is on the right, where causal attention never sees it: no mask is needed, and sorting by length
keeps the waste to a few percent.
"""

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
    reward: float

    def __len__(self) -> int:
        return len(self.prompt_token_ids) + len(self.response_token_ids)


@dataclass(frozen=True)
class MicroBatch:
    """Padded tensors. `seq` covers prompt and response; `resp` starts where the shortest prompt ends.

    `labels[:, j]` is the token at position `first_label + j`, predicted by the logits one position before.
    """

    input_ids: torch.Tensor  # int64 [batch, seq]
    labels: torch.Tensor  # int64 [batch, resp]
    response_mask: torch.Tensor  # bool [batch, resp]
    response_position: torch.Tensor  # int64 [batch, resp]: 0 at a response's first token
    behaviour_logprobs: torch.Tensor  # float32 [batch, resp]
    advantages: torch.Tensor  # float32 [batch, 1]
    rewards: torch.Tensor  # float32 [batch, 1]

    def to(self, device: torch.device) -> "MicroBatch":
        return MicroBatch(**{name: tensor.to(device) for name, tensor in vars(self).items()})


def sequences_of(groups: Sequence[ScoredGroup]) -> list[TrainSequence]:
    """Every completion of the groups, in order."""
    return [
        TrainSequence(group.rollout.item.prompt_token_ids, c.token_ids, c.logprobs, float(a), float(r))
        for group in groups
        for c, a, r in zip(group.rollout.completions, group.advantages, group.rewards, strict=True)
    ]


def micro_batches(sequences: Sequence[TrainSequence], max_tokens: int) -> Iterator[MicroBatch]:
    """Longest first, as many to a micro-batch as keep `rows * longest <= max_tokens` (one at least)."""
    pending = sorted(sequences, key=len, reverse=True)
    while pending:
        rows = max(1, max_tokens // len(pending[0]))
        yield collate(pending[:rows])
        pending = pending[rows:]


def collate(sequences: Sequence[TrainSequence]) -> MicroBatch:
    batch, length = len(sequences), max(len(s) for s in sequences)
    first_label = min(len(s.prompt_token_ids) for s in sequences)
    input_ids = np.zeros((batch, length), dtype=np.int64)
    position = np.full((batch, length), -1, dtype=np.int64)
    logprobs = np.zeros((batch, length), dtype=np.float32)
    for row, s in enumerate(sequences):
        start, end = len(s.prompt_token_ids), len(s)
        input_ids[row, :start] = s.prompt_token_ids
        input_ids[row, start:end] = s.response_token_ids
        position[row, start:end] = np.arange(end - start)
        logprobs[row, start:end] = s.behaviour_logprobs
    positions = torch.from_numpy(position[:, first_label:])
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        labels=torch.from_numpy(input_ids[:, first_label:]),
        response_mask=positions >= 0,
        response_position=positions,
        behaviour_logprobs=torch.from_numpy(logprobs[:, first_label:]),
        advantages=torch.tensor([[s.advantage] for s in sequences]),
        rewards=torch.tensor([[s.reward] for s in sequences]),
    )
