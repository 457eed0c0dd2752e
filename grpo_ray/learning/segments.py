"""Sequences that share beginnings, as a tree of segments: shared tokens are computed once.

A segment is a run of tokens that follows its parent's: a prompt has no parent, a response's parent is its
prompt, and the branches of an episode follow what they have in common. A token attends to the segments on the
path to its own, and to its own up to itself. Nothing below knows how deep the tree is.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

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
        ends = np.cumsum(self.lengths).tolist()
        return tuple(end - length for end, length in zip(ends, self.lengths, strict=True))

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

    def tokens(self, segment: int) -> np.ndarray:
        """Return the indices of the segment's own tokens, int64 `[length]`."""
        return np.arange(self.starts[segment], self.starts[segment] + self.lengths[segment])

    def path(self, segment: int) -> np.ndarray:
        """Return the indices of the tokens from the root to the segment's end, int64 `[depth + length]`."""
        return self._paths[segment]

    @cached_property
    def _paths(self) -> list[np.ndarray]:
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
