"""Sequences laid out for one forward pass, in one of two ways.

Packed: one row without padding, in which sequences that begin alike share tokens (`SegmentTree`).
Padded: one row per sequence. Padding is on the right, where causal attention never reaches it, so no mask is
needed; sorting by length keeps the waste to a few percent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any, Self

import numpy as np
import torch

from grpo_ray.learning.families import SegmentTree, concatenated, segments_of
from grpo_ray.learning.policy_model import TreeAttention
from grpo_ray.learning.sequences import TrainSequence

Plan = Callable[[int], list[list[int]]]  # from the most tokens per micro-batch to the micro-batches' sequences


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass. Tensors `[batch, resp]` have each response's sampled tokens from column 0 on.

    `labels[i]` is predicted at position `sources[i]` of the flattened `input_ids`, and its place in the
    flattened `[batch, resp]` is `places[i]`. Context has no label.
    """

    input_ids: torch.Tensor  # int64 [rows, seq]; rows: 1 if packed, batch if padded
    position_ids: torch.Tensor | None  # int64 [1, seq] if packed
    attention: TreeAttention | None  # if packed
    labels: torch.Tensor  # int64 [sampled tokens]
    sources: torch.Tensor  # int64 [sampled tokens]
    places: torch.Tensor  # int64 [sampled tokens]
    turn_places: torch.Tensor  # int64 [sampled tokens]: each one's place in its turn
    response_mask: torch.Tensor  # bool [batch, resp]
    behaviour_logprobs: torch.Tensor  # float32 [batch, resp]
    advantages: torch.Tensor  # float32 [batch, 1], or [batch, resp] if turns have their own
    switches: torch.Tensor  # int64 [batch, 1], see `TrainSequence.switch`
    num_padding_tokens: int
    sample_tokens: torch.Tensor | None = None  # int64 [batch], see TrainSequence
    proximal_logprobs: torch.Tensor | None = None  # float32 [batch, resp]
    reference_logprobs: torch.Tensor | None = None  # float32 [batch, resp]
    teacher_logprobs: torch.Tensor | None = None  # float32 [batch, resp]
    token_weights: torch.Tensor | None = None  # float32 [batch, resp]
    token_penalties: torch.Tensor | None = None  # float32 [batch, resp]

    @property
    def advantage_mask(self) -> torch.Tensor:
        """The tokens with an advantage other than 0, bool `[batch, resp]`.

        They alone have a gradient from the policy-gradient loss. Metrics are taken over them, because the other
        ones are computed only for some configurations.
        """
        return self.response_mask & (self.advantages != 0)

    @property
    def after_switch(self) -> torch.Tensor:
        """The columns from each response's first switch of versions on, bool `[batch, resp]`."""
        columns = torch.arange(self.response_mask.shape[1], device=self.switches.device)
        return columns >= self.switches

    @property
    def num_prompt_tokens(self) -> int:
        """The tokens of `input_ids` that stand for no label: prompts and context, shared ones once."""
        return max(0, self.input_ids.numel() - self.num_padding_tokens - len(self.labels))

    def to_responses(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of the labels, `[sampled tokens]`, as `[batch, resp]` with zeros elsewhere."""
        width = self.response_mask.shape[1]
        where = self.places // width, self.places % width
        return values.new_zeros(self.response_mask.shape).index_put(where, values)

    def pinned(self) -> Self:
        """Return it in page-locked host memory, from which `to` copies without waiting."""
        pinned: Self = on_tensors(cache(torch.Tensor.pin_memory), self)
        return pinned

    def to(self, device: torch.device) -> Self:
        moved: Self = on_tensors(cache(lambda tensor: tensor.to(device, non_blocking=True)), self)
        return moved


def on_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return the value with each tensor changed, in the fields of dataclasses and the members of tuples too."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple(on_tensors(change, member) for member in value)
    if is_dataclass(value) and not isinstance(value, type):
        changed = {field.name: on_tensors(change, getattr(value, field.name)) for field in fields(value)}
        return replace(value, **changed)
    return value


def collate_packed(
    sequences: Sequence[TrainSequence], attention: Callable[[SegmentTree], TreeAttention]
) -> MicroBatch:
    """Lay the sequences out in one row, each shared token once; `attention` makes the attention of its tree."""
    tree, tokens, last = segments_of(sequences)
    ends = zip(sequences, last, strict=True)
    sources = [s.sampled(tree.paths[segment][len(s.prompt_token_ids) - 1 : -1]) for s, segment in ends]
    return MicroBatch(
        input_ids=torch.from_numpy(concatenated(tokens)[None]),
        position_ids=torch.from_numpy(tree.positions()[None]),
        attention=attention(tree),
        sources=torch.from_numpy(concatenated(sources)),
        num_padding_tokens=0,
        **_of_responses(sequences),
    )


def collate_padded(sequences: Sequence[TrainSequence]) -> MicroBatch:
    """Lay the sequences out in one row each, in the given order."""
    input_ids = np.zeros((len(sequences), max(map(len, sequences))), dtype=np.int64)
    sources = []
    for row, s in enumerate(sequences):
        start, end = len(s.prompt_token_ids), len(s)
        input_ids[row, :start], input_ids[row, start:end] = s.prompt_token_ids, s.response_token_ids
        sources.append(s.sampled(row * input_ids.shape[1] + np.arange(start - 1, end - 1)))
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=None,
        attention=None,
        sources=torch.from_numpy(concatenated(sources)),
        num_padding_tokens=input_ids.size - sum(map(len, sequences)),
        **_of_responses(sequences),
    )


def _of_responses(sequences: Sequence[TrainSequence]) -> dict[str, Any]:
    """Return the fields of a micro-batch that do not depend on its layout."""
    lengths = np.array([s.num_sampled for s in sequences])
    mask = np.arange(lengths.max()) < lengths[:, None]

    def per_token(rows: list[np.ndarray | None]) -> torch.Tensor | None:
        present = [row for row in rows if row is not None]
        if not present:
            return None
        values = np.zeros(mask.shape, dtype=np.float32)
        values[mask] = np.concatenate(present)
        return torch.from_numpy(values)

    advantages: torch.Tensor | None
    if any(isinstance(s.advantage, np.ndarray) for s in sequences):
        advantages = per_token([np.broadcast_to(s.advantage, s.num_sampled) for s in sequences])
    else:
        advantages = torch.tensor([[s.advantage] for s in sequences])
    places = np.flatnonzero(mask)
    turn_places = places % mask.shape[1]
    if any(s.turn_places is not None for s in sequences):
        of_each = (np.arange(s.num_sampled) if s.turn_places is None else s.turn_places for s in sequences)
        turn_places = concatenated(of_each)
    counts = [s.sample_tokens for s in sequences if s.sample_tokens is not None]
    return {
        "labels": torch.from_numpy(concatenated(s.sampled(s.response_token_ids) for s in sequences)),
        "places": torch.from_numpy(places),
        "turn_places": torch.from_numpy(turn_places),
        "response_mask": torch.from_numpy(mask),
        "behaviour_logprobs": per_token([s.behaviour_logprobs for s in sequences]),
        "advantages": advantages,
        "switches": torch.tensor([[s.switch] for s in sequences]),
        "sample_tokens": torch.tensor(counts) if counts else None,
        "proximal_logprobs": per_token([s.proximal_logprobs for s in sequences]),
        "reference_logprobs": per_token([s.reference_logprobs for s in sequences]),
        "teacher_logprobs": per_token([s.teacher_logprobs for s in sequences]),
        "token_weights": per_token([s.token_weights for s in sequences]),
        "token_penalties": per_token([s.token_penalties for s in sequences]),
    }


@dataclass(frozen=True)
class Pass:
    """One micro-batch: the indices of its sequences."""

    indices: list[int]
    counts: bool = True
    """False for a repetition that only keeps the ranks together: its loss is 0."""


def deal(plan: Plan, max_tokens: int, num_ranks: int, cost: Callable[[list[int]], float]) -> list[list[Pass]]:
    """Return each rank's passes, costliest first by `cost` of their sequences' indices; all have as many."""
    batches = _balanced(plan, max_tokens, num_ranks)
    if not batches:
        return [[] for _ in range(num_ranks)]
    _split_to(-(-len(batches) // num_ranks) * num_ranks, batches, cost)
    passes = [Pass(indices) for indices in sorted(batches, key=cost, reverse=True)]
    passes += [Pass(min(batches, key=cost), counts=False)] * (-len(passes) % num_ranks)
    rounds = [passes[first : first + num_ranks] for first in range(0, len(passes), num_ranks)]
    dealt = [each[::-1] if number % 2 else each for number, each in enumerate(rounds)]
    return [list(of_rank) for of_rank in zip(*dealt, strict=True)]


def imbalance(dealt: Sequence[Sequence[Pass]], cost: Callable[[list[int]], float]) -> float:
    """Return the time that the costliest passes of the rounds take, over that of equal ones: 1 is even."""
    costs = [[cost(each.indices) if each.counts else 0.0 for each in passes] for passes in dealt]
    rounds = list(zip(*costs, strict=True))
    useful = sum(map(sum, rounds)) / len(dealt)
    return sum(map(max, rounds)) / useful if useful else 1.0


def _balanced(plan: Plan, max_tokens: int, num_ranks: int) -> list[list[int]]:
    """Plan with the smallest micro-batches that need no more rounds than those of `max_tokens`."""
    best = plan(max_tokens)
    most = -(-len(best) // num_ranks) * num_ranks
    low, high = 0, max_tokens  # too small, small enough
    while high - low > max(1, max_tokens // 64):
        middle = (low + high) // 2
        planned = plan(middle)
        if len(planned) > most:
            low = middle
        else:
            high, best = middle, planned
    return best


def _split_to(number: int, batches: list[list[int]], cost: Callable[[list[int]], float]) -> None:
    """Split the costliest batches in two until there are `number`, or each has one sequence."""
    while len(batches) < number:
        several = [batch for batch in batches if len(batch) > 1]
        if not several:
            return
        costliest = max(several, key=cost)
        batches.remove(costliest)
        middle = len(costliest) // 2
        batches += [costliest[:middle], costliest[middle:]]
