"""The parts of an advantage that need the whole batch, or the reference: computed before its first update.

    KL in the reward  ->  comparison within each group, again  ->  scaling or whitening over the batch

Every rank has the whole batch, and so computes the same advantages. The files keep those of the Scorer.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from grpo_ray.algorithms import advantages_of, shaped_rewards, spread
from grpo_ray.config import Config
from grpo_ray.config.algorithm import AlgorithmConfig
from grpo_ray.episodes.returns import compare_episodes, discounted_returns, turn_rewards_of
from grpo_ray.models.sequences import TrainSequence, sequences_of
from grpo_ray.types import Completion, Episode, ScoredGroup

ROUNDING = 1e-6  # of whitened float32 advantages


def needs_batch(algorithm: AlgorithmConfig) -> bool:
    """Return True if the Scorer's advantages are not yet those that are trained on."""
    return algorithm.advantage_scale != "group" or algorithm.kl.placement == "reward"


def with_batch_advantages(
    groups: Sequence[ScoredGroup], sequences: Sequence[TrainSequence], config: Config
) -> tuple[list[TrainSequence], dict[str, float]]:
    """Return the sequences with their final advantages, and metrics of the change.

    A group without signal can have some afterwards, and the other way round.

    Args:
        groups: the whole batch, as the Scorer left it.
        sequences: `sequences_of` the groups; with the reference's log-probabilities for a KL in the reward.
    """
    algorithm, metrics = config.algorithm, {}
    if algorithm.kl.placement == "reward":
        penalties = kl_penalties(groups, sequences, algorithm.kl.coefficient)
        metrics["reward/kl_penalty"] = float(np.mean([p.sum() for own in penalties for p in own]))
        groups = [_penalized(group, own, config) for group, own in zip(groups, penalties, strict=True)]
    if algorithm.advantage_scale == "batch":
        rewards = np.concatenate([values for group in groups for values in _compared(group, config)])
        metrics["advantage/batch_std"] = std = spread(rewards, algorithm)
        groups = [_changed(group, lambda a: a / (std + algorithm.advantage_eps)) for group in groups]
    elif algorithm.advantage_scale != "group":
        groups, metrics["advantage/batch_std"] = _whitened(groups, algorithm)
    final = sequences_of(groups, algorithm.mask_truncated)
    return [
        replace(new, reference_logprobs=old.reference_logprobs)
        for new, old in zip(final, sequences, strict=True)
    ], metrics


# ---- KL in the reward ----


def kl_penalties(
    groups: Sequence[ScoredGroup], sequences: Sequence[TrainSequence], coefficient: float
) -> list[list[np.ndarray]]:
    """Return `coefficient * log(sampler / reference)` of each completion's sampled tokens, float64, by group.

    (k1, as in TRL's RLOO and in Stiennon et al. arXiv:2009.01325, Section 3.4.) A token without a finite
    logprob of the sampler costs nothing.

    Args:
        sequences: of all completions, in order, with the reference's log-probabilities.
    """
    reference = np.concatenate([s.reference_logprobs for s in sequences if s.reference_logprobs is not None])
    penalties: list[list[np.ndarray]] = []
    start = 0
    for group in groups:
        penalties.append([])
        for completion in group.rollout.completions:
            logprobs = completion.logprobs[completion.mask].astype(np.float64)
            log_ratio = logprobs - reference[start : start + len(logprobs)]
            penalties[-1].append(coefficient * np.where(np.isfinite(logprobs), log_ratio, 0.0))
            start += len(logprobs)
    assert start == len(reference), "sequences of all completions have the reference's logprobs"
    return penalties


def _penalized(group: ScoredGroup, penalties: Sequence[np.ndarray], config: Config) -> ScoredGroup:
    """Subtract the penalties from the rewards, and compare the group again."""
    rewards = (group.rewards - [own.sum() for own in penalties]).astype(np.float32)
    completions, algorithm = group.rollout.completions, config.algorithm
    parts = group.format_rewards, group.answer_rewards
    if not group.rollout.is_of_episodes:
        return replace(
            group,
            rewards=rewards,
            advantages=advantages_of(
                rewards, _lengths(completions), _is_graded(group), algorithm, config.sampling.max_tokens, *parts
            ),
        )
    pairs = zip(completions, penalties, strict=True)
    episodes = [_cheaper(episode, own) for episode, own in pairs if isinstance(episode, Episode)]
    advantages, of_turns = compare_episodes(episodes, *parts, algorithm, config.episodes.turn_discount)
    rollout = replace(group.rollout, completions=tuple(episodes))
    return replace(group, rollout=rollout, rewards=rewards, advantages=advantages, turn_advantages=of_turns)


def _cheaper(episode: Episode, penalties: np.ndarray) -> Episode:
    """Subtract the tokens' penalties from the episode's reward, and those of each turn from the turn's."""
    if episode.reward is None:
        return episode
    per_turn = episode.turn_rewards
    if per_turn is not None:
        of_turns = np.bincount(episode.turns[episode.mask], penalties, minlength=len(per_turn))
        per_turn = tuple(float(value) for value in np.array(per_turn) - of_turns)
    return replace(episode, reward=episode.reward - float(penalties.sum()), turn_rewards=per_turn)


# ---- over the batch ----


def _compared(group: ScoredGroup, config: Config) -> Iterator[np.ndarray]:
    """Yield the values that the group's advantages compare: rewards, or the returns of turns."""
    algorithm, completions = config.algorithm, group.rollout.completions
    episodes = [completion for completion in completions if isinstance(completion, Episode)]
    per_turn = turn_rewards_of(episodes)
    if per_turn is not None:
        yield from (discounted_returns(own or (), config.episodes.turn_discount) for own in per_turn)
    else:
        lengths = _lengths(completions)
        shaped = shaped_rewards(group.rewards, lengths, algorithm, config.sampling.max_tokens)
        yield shaped[_is_graded(group)]


def _whitened(groups: Sequence[ScoredGroup], algorithm: AlgorithmConfig) -> tuple[list[ScoredGroup], float]:
    """Return the groups with advantages of mean 0 and standard deviation 1, and the deviation before.

    (Over tokens: REINFORCE++ arXiv:2501.03262. Over responses: GDPO arXiv:2601.05242, and TRL's RLOO with
    `normalize_advantages`.) Ungraded responses keep advantage 0 and count as little as those that
    `mask_truncated` leaves out. With rewards per turn a turn is what a response is without.
    """
    values = np.concatenate([row for group in groups for row in _rows(group)]).astype(np.float64)
    weights = np.concatenate([w for group in groups for w in _weights(group, algorithm)])
    if not weights.any():
        return list(groups), 0.0
    mean, std = float(np.average(values, weights=weights)), spread(values, algorithm, weights)

    def whiten(advantages: np.ndarray) -> np.ndarray:
        whitened = (advantages - mean) / (std + algorithm.advantage_eps)
        # The rounding of a mean that is 0 in truth must not give signal to groups that have none.
        return np.where((np.abs(whitened) < ROUNDING) | (std == 0), 0.0, whitened)

    return [_changed(group, whiten) for group in groups], std


def _rows(group: ScoredGroup) -> Sequence[np.ndarray]:
    """Return each completion's advantages: `[1]`, or `[turns]` if turns have their own."""
    return group.turn_advantages or np.split(group.advantages, len(group.advantages))


def _weights(group: ScoredGroup, algorithm: AlgorithmConfig) -> Iterator[np.ndarray]:
    """Yield the weight of each of `_rows` in the batch's mean: its tokens, or 1; 0 if it is not trained."""
    completions = group.rollout.completions
    for number, (completion, row) in enumerate(zip(completions, _rows(group), strict=True)):
        if number in group.errors or (algorithm.mask_truncated and completion.is_truncated):
            yield np.zeros(len(row))
        elif algorithm.advantage_scale == "whiten_responses":
            yield np.ones(len(row))
        elif group.turn_advantages and isinstance(completion, Episode):
            yield np.bincount(completion.turns[completion.mask], minlength=len(row)).astype(np.float64)
        else:
            yield np.array([completion.num_tokens], np.float64)


def _changed(group: ScoredGroup, change: Callable[[np.ndarray], np.ndarray]) -> ScoredGroup:
    """Return the group with changed advantages; ungraded responses keep 0."""

    def changed(advantages: np.ndarray) -> np.ndarray:
        return change(advantages.astype(np.float64)).astype(np.float32)

    return replace(
        group,
        advantages=np.where(_is_graded(group), changed(group.advantages), np.float32(0)),
        turn_advantages=tuple(map(changed, group.turn_advantages)),
    )


def _lengths(completions: Sequence[Completion]) -> np.ndarray:
    return np.array([len(completion.token_ids) for completion in completions])


def _is_graded(group: ScoredGroup) -> np.ndarray:
    return np.array([number not in group.errors for number in range(len(group.rewards))])
