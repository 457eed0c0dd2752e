"""Sequences to train on, cut into micro-batches of bounded size, in one of two layouts.

Packed: one row without padding, in which sequences with the same prompt share it (`SegmentTree`).
Padded: one row per sequence. Padding is on the right, where causal attention never reaches it, so no mask is
needed; sorting by length keeps the waste to a few percent.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import torch

from grpo_ray.models.policy_model import TreeAttention
from grpo_ray.models.segments import NO_PARENT, SegmentTree, concatenated
from grpo_ray.types import ScoredGroup

NEVER = 2**31


@dataclass(frozen=True)
class TrainSequence:
    """One prompt and response; the arrays are `[response_tokens]`."""

    prompt_token_ids: tuple[int, ...]
    response_token_ids: np.ndarray
    behaviour_logprobs: np.ndarray
    advantage: float
    has_signal: bool = True  # false if all advantages of its group are 0
    switch: int = NEVER  # first token that another version sampled than the one before it
    proximal_logprobs: np.ndarray | None = None
    reference_logprobs: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.prompt_token_ids) + len(self.response_token_ids)


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass. Tensors `[batch, resp]` have each response's first token in column 0.

    `labels[i]` is predicted at position `sources[i]` of the flattened `input_ids`, and its place in the
    flattened `[batch, resp]` is `places[i]`.
    """

    input_ids: torch.Tensor  # int64 [rows, seq]; rows: 1 if packed, batch if padded
    position_ids: torch.Tensor | None  # int64 [1, seq] if packed
    attention: TreeAttention | None  # if packed
    labels: torch.Tensor  # int64 [response tokens]
    sources: torch.Tensor  # int64 [response tokens]
    places: torch.Tensor  # int64 [response tokens]
    response_mask: torch.Tensor  # bool [batch, resp]
    behaviour_logprobs: torch.Tensor  # float32 [batch, resp]
    advantages: torch.Tensor  # float32 [batch, 1]
    switches: torch.Tensor  # int64 [batch, 1], see TrainSequence
    num_prompt_tokens: int  # of `input_ids`; a prompt that is shared counts once
    proximal_logprobs: torch.Tensor | None = None  # float32 [batch, resp]
    reference_logprobs: torch.Tensor | None = None  # float32 [batch, resp]

    @property
    def advantage_mask(self) -> torch.Tensor:
        """The tokens of responses with an advantage other than 0, bool `[batch, resp]`.

        They alone have a gradient from the policy-gradient loss. Metrics are taken over them, because the other
        responses are computed only for some configurations.
        """
        return self.response_mask & (self.advantages != 0)

    @property
    def after_switch(self) -> torch.Tensor:
        """The columns from each response's first switch of versions on, bool `[batch, resp]`."""
        columns = torch.arange(self.response_mask.shape[1], device=self.switches.device)
        return columns >= self.switches

    @property
    def num_padding_tokens(self) -> int:
        return self.input_ids.numel() - self.num_prompt_tokens - len(self.labels)

    def to_responses(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of the labels, `[response tokens]`, as `[batch, resp]` with zeros elsewhere."""
        width = self.response_mask.shape[1]
        where = self.places // width, self.places % width
        return values.new_zeros(self.response_mask.shape).index_put(where, values)

    def pinned(self) -> Self:
        """Return it in page-locked host memory, from which `to` copies without waiting."""
        return self._each(torch.Tensor.pin_memory)

    def to(self, device: torch.device) -> Self:
        moved = self._each(lambda tensor: tensor.to(device, non_blocking=True))
        return replace(moved, attention=self.attention and self.attention.to(device))

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                values[name] = change(value)
        return replace(self, **values)


def sequences_of(groups: Sequence[ScoredGroup], mask_truncated: bool = False) -> list[TrainSequence]:
    """Return every completion of the groups, in order; `mask_truncated` omits those that were cut off."""
    return [
        TrainSequence(prompt, c.token_ids, c.logprobs, float(a), group.has_signal, first_switch(c.versions))
        for group, prompt in ((group, group.rollout.item.prompt_token_ids) for group in groups)
        for c, a in zip(group.rollout.completions, group.advantages, strict=True)
        if not (mask_truncated and c.is_truncated)
    ]


def first_switch(versions: np.ndarray) -> int:
    """Return the index of the first token that another version sampled than the first; NEVER without one."""
    return int(np.argmax(versions != versions[0])) if np.any(versions != versions[:1]) else NEVER


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


def plan(sequences: Sequence[TrainSequence], max_tokens: int, shares_prompts: bool) -> list[list[int]]:
    """Split the sequences into micro-batches of at most `max_tokens` (but at least one sequence each).

    Longest first: then little is padded, and if memory runs out, it does so at once. A shared prompt counts
    once per micro-batch, and sequences with the same prompt are in the same micro-batch as far as they fit.

    Args:
        max_tokens: of one micro-batch's `input_ids`, with padding.
        shares_prompts: plan for the packed layout; otherwise for the padded one.

    Returns:
        The indices of each micro-batch's sequences.
    """
    return _plan_packed(sequences, max_tokens) if shares_prompts else _plan_padded(sequences, max_tokens)


def _plan_padded(sequences: Sequence[TrainSequence], max_tokens: int) -> list[list[int]]:
    pending = sorted(range(len(sequences)), key=lambda index: len(sequences[index]), reverse=True)
    planned = []
    while pending:
        rows = max(1, max_tokens // len(sequences[pending[0]]))
        planned.append(pending[:rows])
        pending = pending[rows:]
    return planned


def _plan_packed(sequences: Sequence[TrainSequence], max_tokens: int) -> list[list[int]]:
    """Fill one micro-batch after another with whole groups; one that does not fit is split between them."""
    planned: list[list[int]] = []
    room = 0
    for group in sorted(_by_prompt(sequences), key=lambda group: _num_packed(sequences, group), reverse=True):
        if _num_packed(sequences, group) > room:
            planned.append([])
            room = max_tokens
        has_prompt = False
        for index in group:
            needed = len(sequences[index].response_token_ids) if has_prompt else len(sequences[index])
            if needed > room and planned[-1]:
                planned.append([])
                room, needed = max_tokens, len(sequences[index])
            planned[-1].append(index)
            room -= needed
            has_prompt = True
    return planned


def _by_prompt(sequences: Sequence[TrainSequence]) -> list[list[int]]:
    """Return the indices of sequences with the same prompt together, longest response first."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, sequence in enumerate(sequences):
        groups.setdefault(sequence.prompt_token_ids, []).append(index)
    for group in groups.values():
        group.sort(key=lambda index: len(sequences[index].response_token_ids), reverse=True)
    return list(groups.values())


def _num_packed(sequences: Sequence[TrainSequence], group: Sequence[int]) -> int:
    """Return the tokens of sequences that share their prompt."""
    prompt = len(sequences[group[0]].prompt_token_ids)
    return prompt + sum(len(sequences[index].response_token_ids) for index in group)


def collate_packed(
    sequences: Sequence[TrainSequence], attention: Callable[[SegmentTree], TreeAttention]
) -> MicroBatch:
    """Lay the sequences out in one row, each prompt once and its responses after it.

    Args:
        attention: makes the row's attention of its segments.
    """
    tokens: list[np.ndarray] = []
    parents: list[int] = []
    segments = [0] * len(sequences)  # each sequence's response
    for group in _by_prompt(sequences):
        parent = len(parents)
        tokens.append(np.array(sequences[group[0]].prompt_token_ids, np.int64))
        parents.append(NO_PARENT)
        for index in group:
            segments[index] = len(parents)
            tokens.append(sequences[index].response_token_ids)
            parents.append(parent)
    tree = SegmentTree(tuple(map(len, tokens)), tuple(parents))
    sources = [tree.path(segment)[tree.depths[segment] - 1 : -1] for segment in segments]
    return MicroBatch(
        input_ids=torch.from_numpy(concatenated(tokens)[None]),
        position_ids=torch.from_numpy(tree.positions()[None]),
        attention=attention(tree),
        sources=torch.from_numpy(concatenated(sources)),
        num_prompt_tokens=sum(tree.lengths[s] for s, parent in enumerate(parents) if parent == NO_PARENT),
        **_of_responses(sequences),
    )


def collate_padded(sequences: Sequence[TrainSequence]) -> MicroBatch:
    """Lay the sequences out in one row each, in the given order."""
    input_ids = np.zeros((len(sequences), max(map(len, sequences))), dtype=np.int64)
    sources = []
    for row, s in enumerate(sequences):
        start, end = len(s.prompt_token_ids), len(s)
        input_ids[row, :start], input_ids[row, start:end] = s.prompt_token_ids, s.response_token_ids
        sources.append(row * input_ids.shape[1] + np.arange(start - 1, end - 1))
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=None,
        attention=None,
        sources=torch.from_numpy(concatenated(sources)),
        num_prompt_tokens=sum(len(s.prompt_token_ids) for s in sequences),
        **_of_responses(sequences),
    )


def _of_responses(sequences: Sequence[TrainSequence]) -> dict[str, Any]:
    """Return the fields of a micro-batch that do not depend on its layout."""
    lengths = np.array([len(s.response_token_ids) for s in sequences])
    mask = np.arange(lengths.max()) < lengths[:, None]

    def per_token(rows: list[np.ndarray | None]) -> torch.Tensor | None:
        present = [row for row in rows if row is not None]
        if not present:
            return None
        values = np.zeros(mask.shape, dtype=np.float32)
        values[mask] = np.concatenate(present)
        return torch.from_numpy(values)

    return {
        "labels": torch.from_numpy(concatenated(s.response_token_ids for s in sequences)),
        "places": torch.from_numpy(np.flatnonzero(mask)),
        "response_mask": torch.from_numpy(mask),
        "behaviour_logprobs": per_token([s.behaviour_logprobs for s in sequences]),
        "advantages": torch.tensor([[s.advantage] for s in sequences]),
        "switches": torch.tensor([[s.switch] for s in sequences]),
        "proximal_logprobs": per_token([s.proximal_logprobs for s in sequences]),
        "reference_logprobs": per_token([s.reference_logprobs for s in sequences]),
    }
