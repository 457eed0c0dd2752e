"""An episode's tokens, as an append-only tree of segments.

A segment is a run of tokens that follows its parent's: either sampled (each token has a logprob and a version),
or context (messages, tool results, template). A turn's prompt is a path from a root. A prompt that does not
continue an earlier path to its end begins a branch, after the longest path of whole segments that both share.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo_ray.learning.families import NO_PARENT
from grpo_ray.types import CONTEXT, Completion


@dataclass(frozen=True)
class Segment:
    """Tokens after those of its parent; the arrays are `[tokens]`."""

    parent: int  # an earlier segment's index, or NO_PARENT
    token_ids: np.ndarray  # int32
    logprobs: np.ndarray  # float32; 0 in context
    versions: np.ndarray  # int32; CONTEXT in context
    turn: int = CONTEXT  # turn that sampled it, from 0; CONTEXT in context

    @property
    def is_sampled(self) -> bool:
        return self.turn != CONTEXT


@dataclass(frozen=True)
class TrainedPath:
    """One path to train on; the arrays are `[response_tokens]`.

    The response begins with the first token to train and ends with the last; context in between has mask 0.
    """

    prompt_token_ids: tuple[int, ...]
    response_token_ids: np.ndarray  # int32
    mask: np.ndarray  # bool: the tokens to train, which the policy sampled
    logprobs: np.ndarray  # float32; 0 where mask is 0
    versions: np.ndarray  # int32; CONTEXT where mask is 0
    turns: np.ndarray  # int32, the turn that sampled each token; CONTEXT where mask is 0


class Segments:
    """The segments of one episode, in the order in which they were added."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._children: dict[int, list[int]] = {}
        self.num_turns = 0

    def __len__(self) -> int:
        return len(self._segments)

    def __getitem__(self, index: int) -> Segment:
        return self._segments[index]

    def path(self, index: int) -> list[int]:
        """Return the segments from the root to `index`."""
        path = []
        while index != NO_PARENT:
            path.append(index)
            index = self._segments[index].parent
        return path[::-1]

    def token_ids(self, index: int) -> tuple[int, ...]:
        """Return the tokens from the root to the end of `index`."""
        return tuple(np.concatenate([self._segments[i].token_ids for i in self.path(index)]).tolist())

    def add_prompt(self, token_ids: Sequence[int]) -> int:
        """Return the segment that ends the prompt, after adding the tokens that continue an earlier path.

        Raises:
            ValueError: the prompt is empty.
            AssertionError: the path to the segment is not the prompt.
        """
        if not token_ids:
            raise ValueError("the prompt is empty: give at least one token to continue")
        ids = np.asarray(token_ids, np.int32)
        length, parent = self._longest_prefix(ids)
        if length < len(ids):
            rest = ids[length:]
            unsampled = np.zeros(len(rest), np.float32), np.full(len(rest), CONTEXT, np.int32)
            parent = self._add(Segment(parent, rest, *unsampled))
        assert self.token_ids(parent) == tuple(token_ids), "a prompt is exactly the path to its segment"
        return parent

    def add_sample(self, prompt: int, completion: Completion) -> int:
        """Return the new segment of a completion that was sampled after the segment `prompt`."""
        arrays = completion.token_ids, completion.logprobs, completion.versions
        self.num_turns += 1
        return self._add(Segment(prompt, *arrays, self.num_turns - 1))

    def sequences(self) -> list[TrainedPath]:
        """Return the paths to train on; each sampled token has mask 1 in exactly one of them."""
        sampled = [index for index, segment in enumerate(self._segments) if segment.is_sampled]
        continued = {ancestor for index in sampled for ancestor in self.path(index)[:-1]}
        sequences, trained = [], set[int]()
        for index in sampled:
            if index not in continued:
                path = self.path(index)
                # Paths share only beginnings, so what an earlier one has trained stands before the rest.
                first = next(n for n, i in enumerate(path) if i not in trained and self._segments[i].is_sampled)
                sequences.append(self._sequence(path[:first], path[first:]))
                trained.update(path)
        return sequences

    def _sequence(self, prompt: Sequence[int], response: Sequence[int]) -> TrainedPath:
        segments = [self._segments[index] for index in response]
        turns = np.repeat([s.turn for s in segments], [len(s.token_ids) for s in segments]).astype(np.int32)
        return TrainedPath(
            prompt_token_ids=self.token_ids(prompt[-1]),
            response_token_ids=np.concatenate([s.token_ids for s in segments]),
            mask=turns != CONTEXT,
            logprobs=np.concatenate([s.logprobs for s in segments]),
            versions=np.concatenate([s.versions for s in segments]),
            turns=turns,
        )

    def _longest_prefix(self, token_ids: np.ndarray) -> tuple[int, int]:
        """Return the number of tokens, and the last segment, of the longest path that begins the prompt."""
        best, pending = (0, NO_PARENT), [(0, NO_PARENT)]
        while pending:
            start, parent = pending.pop()
            best = max(best, (start, parent))  # of equal paths the latest
            for child in self._children.get(parent, ()):
                end = start + len(self._segments[child].token_ids)
                if np.array_equal(token_ids[start:end], self._segments[child].token_ids):
                    pending.append((end, child))
        return best

    def _add(self, segment: Segment) -> int:
        index = len(self._segments)
        self._segments.append(segment)
        self._children.setdefault(segment.parent, []).append(index)
        return index
