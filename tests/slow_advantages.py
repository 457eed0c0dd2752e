"""Advantages over a batch in plain loops over groups, responses, turns and tokens: a slow reference."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev, stdev

from grpo_ray.config import Config
from grpo_ray.types import CONTEXT, Episode, ScoredGroup


@dataclass
class Sample:
    """A response or an episode."""

    turns: list[int]  # of each sampled token
    penalties: list[float]  # of each sampled token
    is_graded: bool
    is_trained: bool
    rewards: list[float]  # one, or one per turn
    is_by_turn: bool = False
    advantages: list[float] | None = None  # like the rewards
    to_go: list[float] | None = None  # subtracted from each sampled token's advantage

    def by_token(self) -> list[float]:
        assert self.advantages is not None
        if not self.is_graded:
            return [0.0] * len(self.turns)
        own = [self.advantages[turn if self.is_by_turn else 0] for turn in self.turns]
        return [a - cost for a, cost in zip(own, self.to_go or [0.0] * len(own), strict=True)]


def slow_batch(
    groups: Sequence[ScoredGroup], reference: dict[tuple[int, int], list[float]], config: Config
) -> list[list[Sample]]:
    """Return the samples of each group with their final advantages; `reference` has logprobs by sample."""
    algorithm = config.algorithm
    batch = [
        [_sample(group, place, number, reference, config) for number in range(len(group.rewards))]
        for place, group in enumerate(groups)
    ]
    for samples in batch:
        _compare(samples, config)
    everyone = [sample for samples in batch for sample in samples]
    if algorithm.kl.placement == "reward_to_go":
        for s in everyone:
            s.to_go = _to_go(s, config.episodes.turn_discount if s.is_by_turn else 1.0)
    deviation = stdev if algorithm.std == "sample" else pstdev
    eps = algorithm.advantage_eps
    if algorithm.advantage_scale == "batch":
        std = deviation([value for s in everyone if s.is_graded for value in s.rewards])
        for s in everyone:
            s.advantages = [a / (std + eps) for a in s.advantages or ()]
    elif algorithm.advantage_scale != "group":
        counted: list[float] = []
        for s in everyone:
            if s.is_graded and s.is_trained:
                of_tokens = algorithm.advantage_scale == "whiten_tokens"
                counted += s.by_token() if of_tokens else s.advantages or ()
        mean, std = fmean(counted), deviation(counted)
        for s in everyone:
            s.advantages = [(a - mean) / (std + eps) if s.is_graded else 0.0 for a in s.advantages or ()]
            s.to_go = None if s.to_go is None else [cost / (std + eps) for cost in s.to_go]
    return batch


def _to_go(sample: Sample, discount: float) -> list[float]:
    """Sum over the token itself and all later ones; a token of a later turn is later, wherever it stands."""
    costs = []
    for t, turn in enumerate(sample.turns):
        total = 0.0
        for u, other in enumerate(sample.turns):
            if other > turn or (other == turn and u >= t):
                total += discount ** (other - turn) * sample.penalties[u]
        costs.append(total)
    return costs


def _sample(
    group: ScoredGroup, place: int, number: int, reference: dict[tuple[int, int], list[float]], config: Config
) -> Sample:
    algorithm, completion = config.algorithm, group.rollout.completions[number]
    sampled = [t for t in range(len(completion.token_ids)) if completion.versions[t] != CONTEXT]
    own = [float(completion.logprobs[t]) for t in sampled]
    penalties = [0.0] * len(own)
    in_rewards = algorithm.kl.placement == "reward"
    if algorithm.kl.placement != "loss":
        pairs = zip(own, reference[place, number], strict=True)
        penalties = [algorithm.kl.coefficient * (p - r) if math.isfinite(p) else 0.0 for p, r in pairs]
    is_trained = not (algorithm.mask_truncated and completion.is_truncated)
    is_graded, rewards, turns = number not in group.errors, [float(group.rewards[number])], [0] * len(own)
    is_by_turn = False
    if isinstance(completion, Episode):
        turns = [int(completion.turns[t]) for t in sampled]
        episodes = [c for c in group.rollout.completions if isinstance(c, Episode)]
        is_by_turn = any(e.turn_rewards is not None for e in episodes)
        if is_by_turn and not is_graded:
            rewards = []
        elif is_by_turn and completion.turn_rewards is not None:
            rewards = list(completion.turn_rewards)
        elif is_by_turn:
            rewards = [0.0] * completion.num_turns
            rewards[-1:] = [float(completion.reward or 0.0)] if rewards else []
    if is_graded and in_rewards:
        for turn, penalty in zip(turns, penalties, strict=True):
            rewards[turn if is_by_turn else 0] -= penalty
    if is_by_turn:
        for turn in reversed(range(len(rewards) - 1)):
            rewards[turn] += config.episodes.turn_discount * rewards[turn + 1]
    elif not isinstance(completion, Episode) and algorithm.overlong_buffer_tokens:
        over = len(completion.token_ids) - (config.sampling.max_tokens - algorithm.overlong_buffer_tokens)
        rewards[0] -= algorithm.overlong_penalty * min(1, max(0, over / algorithm.overlong_buffer_tokens))
    return Sample(turns, penalties, is_graded, is_trained, rewards, is_by_turn)


def _compare(samples: list[Sample], config: Config) -> None:
    algorithm = config.algorithm
    for s in samples:
        s.advantages = [0.0] * len(s.rewards)
    for turn in range(max(len(s.rewards) for s in samples)):
        present = [s for s in samples if s.is_graded and turn < len(s.rewards)]
        values = [s.rewards[turn] for s in present]
        for s in present:
            assert s.advantages is not None
            own, kind = s.rewards[turn], algorithm.advantage_kind
            others = (sum(values) - own) / (len(values) - 1) if len(values) > 1 else own
            centred = own - fmean(values)
            if kind == "raw":
                s.advantages[turn] = own
            elif kind == "leave_one_out":
                s.advantages[turn] = own - others
            elif kind == "mean":
                s.advantages[turn] = centred
            else:
                assert kind == "mean_std"
                deviation = stdev if algorithm.std == "sample" else pstdev
                std = deviation(values) if len(values) > 1 else 0.0
                s.advantages[turn] = centred / (std + algorithm.advantage_eps)
