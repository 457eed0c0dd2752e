"""The sequences that a batch is trained on, split into minibatches, and those into micro-batches."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

import numpy as np

from grpo_ray.learning.families import Family, families_of
from grpo_ray.types import CONTEXT, NO_VERSION, Episode, ScoredGroup
from grpo_ray.watch.flops import Lengths

NEVER = 2**31


@dataclass(frozen=True)
class TrainSequence:
    """One prompt and response. Context within the response is input alone: only sampled tokens have values."""

    prompt_token_ids: tuple[int, ...]
    response_token_ids: np.ndarray  # [response_tokens]
    behaviour_logprobs: np.ndarray  # [sampled_tokens], like all values below
    advantage: float | np.ndarray  # an array if turns or tokens have their own
    versions: np.ndarray = field(default_factory=partial(np.zeros, 0, int))  # that sampled each token, if known
    proximal_logprobs: np.ndarray | None = None
    reference_logprobs: np.ndarray | None = None
    teacher_logprobs: np.ndarray | None = None
    mask: np.ndarray | None = None  # bool [response_tokens], true where the policy sampled; None: everywhere
    turn_places: np.ndarray | None = None  # each token's place in its turn; None: the response is one turn
    sample: tuple[int, int] | None = None
    """The places of its group in the batch and of its episode in the group: an episode with branches is one
    sample of several sequences. None: no episode, so a sample of its own."""
    sample_tokens: int | None = None
    """Tokens that the loss's mean is over, if they are not this sequence's alone: of all its sample's
    sequences, or with `prompt_mean` of all its group's."""
    entropies: np.ndarray | None = None  # nats, of the policy before the first update, for a token selection
    token_weights: np.ndarray | None = None  # of a token selection: factors of the losses, and
    token_penalties: np.ndarray | None = None  # coefficients of |log(pi / pi_old)|
    group: int = 0  # place of its group in the batch

    def __len__(self) -> int:
        return len(self.prompt_token_ids) + len(self.response_token_ids)

    @property
    def num_sampled(self) -> int:
        return len(self.behaviour_logprobs)

    @property
    def has_signal(self) -> bool:
        """True if any token has an advantage, a penalty or a teacher's word; else only added terms act."""
        has_penalty = self.token_penalties is not None and bool(self.token_penalties.any())
        return has_penalty or self.teacher_logprobs is not None or bool(np.any(self.advantage != 0.0))

    @property
    def oldest_version(self) -> int:
        """The smallest version that sampled any of its tokens; NO_VERSION if none is known."""
        return int(self.versions.min(initial=NO_VERSION))

    @property
    def switch(self) -> int:
        """Index of the first token that another version sampled than the first; NEVER without one."""
        differs = self.versions != self.versions[:1]
        return int(differs.argmax()) if differs.any() else NEVER

    def before_any_update(self, version: int) -> "TrainSequence":
        """Leave out what only rounding makes, before the first update on a batch by that version's policy."""
        given = self.token_penalties
        penalties = None if given is None else given * (self.versions != version)
        return replace(self, proximal_logprobs=None, token_penalties=penalties)  # it is its own proximal one

    def tokens(self, start: int = 0, end: int = NEVER) -> np.ndarray:
        """Return the tokens `[start, end)` of prompt and response together."""
        length = len(self.prompt_token_ids)
        response = self.response_token_ids[max(0, start - length) : max(0, end - length)]
        if start >= length:
            return response
        return np.concatenate([np.array(self.prompt_token_ids[start:end], np.int64), response])

    def sampled(self, values: np.ndarray) -> np.ndarray:
        """Return those of `[response_tokens]` values that belong to sampled tokens."""
        return values if self.mask is None else values[self.mask]


def sequences_of(groups: Sequence[ScoredGroup], mask_truncated: bool = False) -> list[TrainSequence]:
    """Return the sequences of every completion, in order; `mask_truncated` omits completions that were cut off.

    An episode has one per branch; a branch in which nothing was sampled has none.
    """
    sequences: list[TrainSequence] = []
    for place, group in enumerate(groups):
        prompt, completions = group.rollout.item.prompt_token_ids, group.rollout.completions
        rows = zip(completions, group.advantages, group.teacher_rows, strict=True)
        for number, (c, a, taught) in enumerate(rows):
            if mask_truncated and c.is_truncated:
                continue
            advantage = float(a)
            if isinstance(c, Episode):
                of_turns = group.turn_advantages[number] if group.turn_advantages else None
                sequences += _of_episode(c, advantage, of_turns, (place, number), taught)
            else:
                values = c.token_ids, c.logprobs, advantage, c.versions
                sequences.append(TrainSequence(prompt, *values, None, None, taught, group=place))
    return sequences


def _of_episode(
    episode: Episode, advantage: float, of_turns: np.ndarray | None, sample: tuple[int, int],
    taught: np.ndarray | None,
) -> Iterator[TrainSequence]:  # fmt: skip
    """Yield the episode's sequences; `of_turns` are the advantages `[turns]`, empty if it is left out."""
    if of_turns is not None and not len(of_turns):  # without a reward, so its advantage is no turn's
        of_turns = None
    for sequence in episode.sequences:
        own = slice(sequence.start, sequence.end)
        mask = episode.mask[own]
        if not mask.any():
            continue
        turns = episode.turns[own]
        logprobs, versions = (x[own][mask] for x in (episode.logprobs, episode.versions))
        yield TrainSequence(
            sequence.prompt_token_ids, episode.token_ids[own], logprobs,
            advantage if of_turns is None else of_turns[turns[mask]], versions,
            mask=None if mask.all() else mask, turn_places=places_in_turns(turns, mask), sample=sample,
            teacher_logprobs=None if taught is None else taught[own][mask], group=sample[0],
        )  # fmt: skip


def places_in_turns(turns: np.ndarray, mask: np.ndarray) -> np.ndarray | None:
    """Return the place of each token in its turn, int64 `[sampled_tokens]`; None if they just count up.

    Args:
        turns: `[response_tokens]`, CONTEXT outside turns.
        mask: bool `[response_tokens]`; false outside turns, and where the tokens of a turn are left out.
    """
    starts = np.flatnonzero(np.diff(turns, prepend=CONTEXT - 1))
    places = np.arange(len(turns)) - np.repeat(starts, np.diff(starts, append=len(turns)))
    sampled: np.ndarray = places[mask]
    return None if np.array_equal(sampled, np.arange(len(sampled))) else sampled


def samples_of(sequences: Sequence[TrainSequence], by_prompt: bool = False) -> list[list[TrainSequence]]:
    """Return the sequences of each sample, or of each prompt, in the order of their first."""
    units: dict[object, list[TrainSequence]] = {}
    for index, sequence in enumerate(sequences):
        sample = index if sequence.sample is None else sequence.sample
        units.setdefault(sequence.group if by_prompt else sample, []).append(sequence)
    return list(units.values())


def minibatches(
    sequences: Sequence[TrainSequence], size: int | None, num_epochs: int, seed: str
) -> list[list[TrainSequence]]:
    """Shuffle each epoch and split it into minibatches of `size` samples; return those of all epochs, in order.

    If `size` does not divide the samples, all minibatches are a little smaller, so that no remainder of a few
    samples gets an update of its own. None means one minibatch per epoch, in the given order.
    """
    samples = samples_of(sequences)
    if size is None or size >= len(samples):
        return [list(sequences)] * num_epochs
    updates = []
    for epoch in range(num_epochs):
        shuffled = list(samples)
        random.Random(f"{seed}/{epoch}").shuffle(shuffled)
        num_updates = -(-len(shuffled) // size)
        updates += [list(chain.from_iterable(shuffled[first::num_updates])) for first in range(num_updates)]
    return updates


def lengths_of(sequences: Sequence[TrainSequence]) -> Lengths:
    """Return the lengths of the sequences, by which their FLOPs are counted."""
    order = chain(*families_of(sequences))
    return [(overlap, len(sequences[index]), sequences[index].num_sampled) for index, overlap in order]


def plan(sequences: Sequence[TrainSequence], max_tokens: int, shares_prompts: bool) -> list[list[int]]:
    """Return the indices of the sequences in each micro-batch of at most `max_tokens`, but at least one each.

    Longest first: then little is padded, and if memory runs out, it does so at once. Shared tokens count once
    per micro-batch, and sequences that share some are in the same micro-batch as far as they fit.

    Args:
        max_tokens: of one micro-batch's `input_ids`, with padding.
        shares_prompts: plan for the packed layout; otherwise for the padded one.
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

    def num_tokens(family: Family) -> int:
        return sum(len(sequences[index]) - overlap for index, overlap in family)

    planned: list[list[int]] = []
    room = 0
    for family in sorted(families_of(sequences), key=num_tokens, reverse=True):
        if num_tokens(family) > room:
            planned.append([])
            room = max_tokens
        for index, overlap in family:
            needed = len(sequences[index]) - overlap
            if needed > room and planned[-1]:
                planned.append([])
                room, needed = max_tokens, len(sequences[index])
            planned[-1].append(index)
            room -= needed
    return planned
