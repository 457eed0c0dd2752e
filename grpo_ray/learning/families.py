"""Sequences that share tokens, by families, and as a tree of segments.

A family is the completions of one prompt, or the episodes of one group. Usually they have one prompt, and share
it alone: responses to it never share tokens, even if they begin alike. If an episode has branched, there are
several prompts, and sequences with different ones share all with which they begin.

A segment is a run of tokens that follows its parent's: a prompt has no parent, a response's parent is its
prompt, and the branches of an episode follow what they have in common. A token attends to the segments on the
path to its own, and to its own up to itself. The code that computes does not know how deep the tree is.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING

import numpy as np

NO_PARENT = -1


@dataclass(frozen=True)
class SegmentTree:
    """Segments end to end in one row of tokens; every parent stands before its children."""

    lengths: tuple[int, ...]  # tokens of each segment, at least 1
    parents: tuple[int, ...]  # the index of each segment's parent, or NO_PARENT

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Index of each segment's first token in the row."""
        return tuple(accumulate(self.lengths[:-1], initial=0))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Number of tokens on the path before each segment, which is the position of its first token."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent == NO_PARENT else depths[parent] + self.lengths[parent])
        return tuple(depths)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def paths(self) -> list[np.ndarray]:
        """Indices of the tokens from the root to each segment's end, int64 `[depth + length]`."""
        paths: list[np.ndarray] = []
        row = np.arange(self.num_tokens)
        for parent, start, length in zip(self.parents, self.starts, self.lengths, strict=True):
            own = row[start : start + length]
            paths.append(own if parent == NO_PARENT else np.concatenate((paths[parent], own)))
        return paths

    def positions(self) -> np.ndarray:
        """Return each token's position in its sequence, int64 `[num_tokens]`."""
        before = np.repeat(np.subtract(self.starts, self.depths), self.lengths)
        positions: np.ndarray = np.arange(self.num_tokens) - before
        return positions


def concatenated(arrays: Iterable[np.ndarray]) -> np.ndarray:
    """Concatenate into one int64 array, empty for none."""
    return np.concatenate([np.zeros(0, np.int64), *arrays])


def padded(arrays: Sequence[np.ndarray], on_left: bool = False) -> np.ndarray:
    """Return index arrays as rows of one length, int64 `[rows, longest]`, padded with -1."""
    rows = np.full((len(arrays), max(map(len, arrays))), -1, np.int64)
    for row, array in zip(rows, arrays, strict=True):
        row[len(row) - len(array) if on_left else 0 :][: len(array)] = array
    return rows


if TYPE_CHECKING:  # it imports this module
    from grpo_ray.learning.sequences import TrainSequence


Family = list[tuple[int, int]]
"""Sequences by their indices, each with its overlap: the number of first tokens shared with the one before it.
In their order nothing else is shared with any before it, in every run of consecutive sequences too."""


def families_of(sequences: "Sequence[TrainSequence]") -> list[Family]:
    """Return the families, in the order of their first sequences."""
    by_group: dict[object, list[int]] = {}
    for index, s in enumerate(sequences):
        by_group.setdefault(s.prompt_token_ids if s.sample is None else s.sample[0], []).append(index)
    families = []
    for indices in by_group.values():
        first = sequences[indices[0]]
        if first.sample is None or len({sequences[index].prompt_token_ids for index in indices}) == 1:
            indices.sort(key=lambda index: len(sequences[index]), reverse=True)  # longest first
            overlaps = [len(first.prompt_token_ids)] * (len(indices) - 1)
        else:  # as a dictionary orders words
            indices.sort(key=lambda index: sequences[index].tokens().astype(">i8").tobytes())
            overlaps = [_overlap(sequences[one], sequences[other]) for one, other in pairwise(indices)]
        families.append(list(zip(indices, [0, *overlaps], strict=True)))
    return families


def _overlap(one: "TrainSequence", other: "TrainSequence") -> int:
    if one.prompt_token_ids == other.prompt_token_ids:
        return len(one.prompt_token_ids)
    shorter = min(len(one), len(other))
    differ = np.flatnonzero(one.tokens(0, shorter) != other.tokens(0, shorter))
    return int(differ[0]) if len(differ) else shorter


def segments_of(sequences: "Sequence[TrainSequence]") -> tuple[SegmentTree, list[np.ndarray], list[int]]:
    """Return the sequences as one tree, each segment's tokens, and the segment in which each sequence ends."""
    indices, overlaps = zip(*chain(*families_of(sequences)), strict=True)
    tokens: list[np.ndarray] = []
    parents, ends, last = list[int](), list[int](), dict[int, int]()
    path: list[int] = []  # the latest sequence's segments
    for place, (index, start) in enumerate(zip(indices, overlaps, strict=True)):
        while path and ends[path[-1]] > start:
            path.pop()
        for end in _cuts(len(sequences[index]), overlaps, place):
            parents.append(path[-1] if path else NO_PARENT)
            path.append(len(tokens))
            tokens.append(sequences[index].tokens(start, end))
            ends.append(end)
            start = end
        last[index] = path[-1]
    tree = SegmentTree(tuple(map(len, tokens)), tuple(parents))
    return tree, tokens, [last[index] for index in range(len(sequences))]


def _cuts(length: int, overlaps: Sequence[int], place: int) -> list[int]:
    """Return the ends of a sequence's own segments, where later ones leave it."""
    ends, start = [length] * (length > overlaps[place]), overlaps[place]
    for later in range(place + 1, len(overlaps)):
        if overlaps[later] <= start:
            break
        if overlaps[later] < ends[-1]:
            ends.append(overlaps[later])
    return ends[::-1]
