"""Sequences that share tokens: how many, as a tree of segments, and cut into micro-batches of bounded size.

A family is the sequences of one group. Usually they have one prompt and share it alone. If an episode has
branched, there are several prompts, which may hold tokens of other sequences; then all that begins alike is
shared. A family's order keeps what shares most together, so each sequence's overlap with the one before it is
all that it shares with any before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from grpo_ray.models.segments import NO_PARENT, SegmentTree
from grpo_ray.policy.sequences import TrainSequence
from grpo_ray.telemetry.flops import Lengths


@dataclass(frozen=True)
class Family:
    """Sequences by their indices, each with the number of first tokens shared with the one before it."""

    indices: list[int]
    overlaps: list[int]
    num_tokens: int  # each shared token once


def families_of(sequences: Sequence[TrainSequence]) -> list[Family]:
    """Return the families, in the order of their first sequences."""
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index, sequence in enumerate(sequences):
        by_prompt.setdefault(sequence.prompt_token_ids, []).append(index)
    by_group: dict[object, list[list[int]]] = {}
    for prompt, indices in by_prompt.items():
        sample = sequences[indices[0]].sample
        by_group.setdefault(prompt if sample is None else sample[0], []).append(indices)
    return [
        _of_one_prompt(sequences, prompts[0])
        if len(prompts) == 1
        else _of_branches(sequences, list(chain(*prompts)))
        for prompts in by_group.values()
    ]


def _of_one_prompt(sequences: Sequence[TrainSequence], indices: list[int]) -> Family:
    """Order by length, longest response first."""
    indices = sorted(indices, key=lambda index: len(sequences[index]), reverse=True)
    prompt = len(sequences[indices[0]].prompt_token_ids)
    num_tokens = sum(len(sequences[index]) for index in indices) - prompt * (len(indices) - 1)
    return Family(indices, [0] + [prompt] * (len(indices) - 1), num_tokens)


def _of_branches(sequences: Sequence[TrainSequence], indices: list[int]) -> Family:
    """Order by tokens, as a dictionary does words."""
    indices = sorted(indices, key=lambda index: sequences[index].token_ids.astype(">i8").tobytes())
    rows = [sequences[index].token_ids for index in indices]
    overlaps = [0] + [_overlap(rows[place], rows[place + 1]) for place in range(len(rows) - 1)]
    return Family(indices, overlaps, sum(map(len, rows)) - sum(overlaps))


def _overlap(one: np.ndarray, other: np.ndarray) -> int:
    """Return the number of first tokens that are the same."""
    shorter = min(len(one), len(other))
    return int(np.append(one[:shorter] != other[:shorter], True).argmax())


def lengths_of(sequences: Sequence[TrainSequence]) -> Lengths:
    """Return the lengths of the sequences, by which their FLOPs are counted."""
    return [
        (overlap, len(sequences[index]), sequences[index].num_sampled)
        for family in families_of(sequences)
        for index, overlap in zip(family.indices, family.overlaps, strict=True)
    ]


def segments_of(sequences: Sequence[TrainSequence]) -> tuple[SegmentTree, list[np.ndarray], list[int]]:
    """Return the sequences as one tree, each segment's tokens, and the segment in which each sequence ends."""
    tokens: list[np.ndarray] = []
    parents: list[int] = []
    last = [NO_PARENT] * len(sequences)
    for family in families_of(sequences):
        path: list[tuple[int, int]] = []  # the latest sequence's segments, and the tokens up to their ends
        for place, (index, start) in enumerate(zip(family.indices, family.overlaps, strict=True)):
            while path and path[-1][1] > start:
                path.pop()
            for end in _cuts(len(sequences[index]), family.overlaps[place:]):
                parents.append(path[-1][0] if path else NO_PARENT)
                path.append((len(tokens), end))
                tokens.append(sequences[index].tokens(start, end))
                start = end
            last[index] = path[-1][0]
    return SegmentTree(tuple(map(len, tokens)), tuple(parents)), tokens, last


def _cuts(length: int, overlaps: Sequence[int]) -> list[int]:
    """Return the ends of a sequence's own segments, where later ones leave it.

    Args:
        overlaps: the sequence's own and those of the later ones.
    """
    ends, start = [length] * (length > overlaps[0]), overlaps[0]
    for overlap in overlaps[1:]:
        if overlap <= start:
            break
        if overlap < ends[-1]:
            ends.append(overlap)
    return ends[::-1]


def plan(sequences: Sequence[TrainSequence], max_tokens: int, shares_prompts: bool) -> list[list[int]]:
    """Split the sequences into micro-batches of at most `max_tokens` (but at least one sequence each).

    Longest first: then little is padded, and if memory runs out, it does so at once. Shared tokens count once
    per micro-batch, and sequences that share some are in the same micro-batch as far as they fit.

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
    """Fill one micro-batch after another with whole families; one that does not fit is split between them."""
    planned: list[list[int]] = []
    room = 0
    for family in sorted(families_of(sequences), key=lambda family: family.num_tokens, reverse=True):
        if family.num_tokens > room:
            planned.append([])
            room = max_tokens
        for index, overlap in zip(family.indices, family.overlaps, strict=True):
            needed = len(sequences[index]) - overlap
            if needed > room and planned[-1]:
                planned.append([])
                room, needed = max_tokens, len(sequences[index])
            planned[-1].append(index)
            room -= needed
    return planned
