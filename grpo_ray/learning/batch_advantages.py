"""The parts of an advantage that need the whole batch, or the reference: computed before its first update.

    KL in the reward  ->  comparison within each group, again  ->  scaling or whitening over responses
                      ->  KL from each token on                ->  whitening over tokens

Every rank has the whole batch, and so computes the same advantages. The files keep those of the Scorer.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from grpo_ray.config import Config
from grpo_ray.config.algorithm import AlgorithmConfig
from grpo_ray.config.reward import term_weights
from grpo_ray.learning.sequences import TrainSequence, sequences_of
from grpo_ray.objectives import advantages_of
from grpo_ray.objectives.comparison import shaped_rewards, spread
from grpo_ray.objectives.returns import compare_episodes, discounted_returns, penalties_to_go, turn_rewards_of
from grpo_ray.types import Completion, Episode, ScoredGroup

ROUNDING = 1e-6  # of whitened float32 advantages


def needs_batch(algorithm: AlgorithmConfig) -> bool:
    """Return True if the Scorer's advantages are not yet those that are trained on."""
    return algorithm.advantage_scale != "group" or algorithm.kl.placement != "loss"


def with_batch_advantages(
    groups: Sequence[ScoredGroup], sequences: Sequence[TrainSequence], config: Config
) -> tuple[list[TrainSequence], dict[str, float]]:
    """Return the sequences with their final advantages, and metrics of the change.

    A group without signal can have some afterwards, and the other way round.

    Args:
        groups: the whole batch, as the Scorer left it.
        sequences: `sequences_of` the groups; for a KL in the reward with the reference's log-probabilities, and
            with the policy's own if tokens of an earlier version are among them.
    """
    algorithm, metrics = config.algorithm, {}
    scale, placement = algorithm.advantage_scale, algorithm.kl.placement
    penalties: list[list[np.ndarray]] = []
    if placement != "loss":
        penalties = kl_penalties(groups, sequences, algorithm.kl.coefficient)
        metrics["reward/kl_penalty"] = float(np.mean([p.sum() for own in penalties for p in own]))
    if placement == "reward":
        groups = [_penalized(group, own, config) for group, own in zip(groups, penalties, strict=True)]
    if scale == "batch":
        rewards = np.concatenate([values for group in groups for values in _compared(group, config)])
        metrics["advantage/batch_std"] = std = spread(rewards, algorithm)
        groups = [_changed(group, lambda a: a / (std + algorithm.advantage_eps)) for group in groups]
    elif scale == "whiten_responses":
        whiten, metrics["advantage/batch_std"] = _whitening(_trained_rows(groups, algorithm), algorithm)
        groups = [_changed(group, whiten) for group in groups]
    is_by_token = placement == "reward_to_go" or scale == "whiten_tokens"
    if is_by_token:  # NaN marks what was not graded until every token has its advantage
        groups = [replace(g, advantages=np.where(g.is_graded, g.advantages, np.nan)) for g in groups]
    compared = zip(sequences, sequences_of(groups, algorithm.mask_truncated), strict=True)
    final = [replace(old, advantage=new.advantage) for old, new in compared]
    if placement == "reward_to_go":
        final = _with_penalties_to_go(final, groups, penalties, config.episodes.turn_discount)
    if scale == "whiten_tokens":
        rows = [np.broadcast_to(s.advantage, s.num_sampled) for s in final]
        whiten, metrics["advantage/batch_std"] = _whitening(rows, algorithm)
        final = [replace(s, advantage=whiten(np.asarray(s.advantage, np.float64))) for s in final]
    return _settled(final) if is_by_token else final, metrics


def kl_penalties(
    groups: Sequence[ScoredGroup], sequences: Sequence[TrainSequence], coefficient: float
) -> list[list[np.ndarray]]:
    """Return `coefficient * log(policy / reference)` of each completion's sampled tokens, float64, by group.

    (k1, as in TRL's RLOO and in Stiennon et al. arXiv:2009.01325, Section 3.4.) The policy is the one before
    the batch's first update. Sequences without its logprobs were sampled by it, so the sampler's are taken. A
    token without a finite logprob costs nothing.

    Args:
        sequences: of all completions, in order, with the reference's log-probabilities; none without tokens.
    """
    of_reference = [s.reference_logprobs for s in sequences if s.reference_logprobs is not None]
    of_each = [s.behaviour_logprobs if s.proximal_logprobs is None else s.proximal_logprobs for s in sequences]
    reference, of_policy = (np.concatenate([np.zeros(0), *rows]) for rows in (of_reference, of_each))
    penalties: list[list[np.ndarray]] = []
    start = 0
    for group in groups:
        penalties.append([])
        for completion in group.rollout.completions:
            own = slice(start, start + int(np.count_nonzero(completion.mask)))
            logprobs = of_policy[own].astype(np.float64)
            log_ratio = logprobs - reference[own]
            penalties[-1].append(coefficient * np.where(np.isfinite(logprobs), log_ratio, 0.0))
            start = own.stop
    assert start == len(reference), "sequences of all completions have the reference's logprobs"
    return penalties


def _with_penalties_to_go(
    sequences: Sequence[TrainSequence], groups: Sequence[ScoredGroup],
    penalties: Sequence[Sequence[np.ndarray]], turn_discount: float,
) -> list[TrainSequence]:  # fmt: skip
    """Subtract from the advantage of each token its penalty and those that follow in its response."""
    to_go = []
    for group, of_group in zip(groups, penalties, strict=True):
        discount = turn_discount if group.turn_advantages else 1.0
        for completion, own in zip(group.rollout.completions, of_group, strict=True):
            turns = np.zeros(len(own), np.int32)
            if isinstance(completion, Episode):
                turns = completion.turns[completion.mask]
            to_go.append(penalties_to_go(own, turns, discount))
    rows = np.split(np.concatenate(to_go), np.cumsum([s.num_sampled for s in sequences], dtype=int))[:-1]
    return [replace(s, advantage=s.advantage - row) for s, row in zip(sequences, rows, strict=True)]


def _penalized(group: ScoredGroup, penalties: Sequence[np.ndarray], config: Config) -> ScoredGroup:
    """Subtract the penalties from the rewards, and compare the group again."""
    rewards = (group.rewards - [own.sum() for own in penalties]).astype(np.float32)
    completions, algorithm = group.rollout.completions, config.algorithm
    parts = group.format_rewards, group.answer_rewards
    if not group.rollout.is_of_episodes:
        terms = group.terms, term_weights(config.rewards[group.rollout.item.task])
        fixed = group.is_graded, algorithm, config.sampling.max_tokens, *parts, *terms
        return replace(group, rewards=rewards, advantages=advantages_of(rewards, _lengths(completions), *fixed))
    episodes = [completion for completion in completions if isinstance(completion, Episode)]
    per_turn = turn_rewards_of(episodes)
    if per_turn is not None:  # one that was cut off has none of its own, but its turns pay for their own tokens
        rewarded = zip(episodes, per_turn, strict=True)
        episodes = [replace(e, turn_rewards=None if own is None else tuple(own)) for e, own in rewarded]
    episodes = [_cheaper(episode, own) for episode, own in zip(episodes, penalties, strict=True)]
    earned, lengths = [e.reward for e in episodes], np.array([e.num_tokens for e in episodes])
    advantages, of_turns = compare_episodes(
        earned, turn_rewards_of(episodes), algorithm, config.episodes.turn_discount, *parts, lengths
    )
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
        yield shaped[group.is_graded]


def _whitening(
    rows: Sequence[np.ndarray], algorithm: AlgorithmConfig
) -> tuple[Callable[[np.ndarray], np.ndarray], float]:
    """Return the function that gives advantages mean 0 and standard deviation 1, and the deviation before.

    (Over tokens: REINFORCE++ arXiv:2501.03262. Over responses: GDPO arXiv:2601.05242, and TRL's RLOO with
    `normalize_advantages`.) NaN does not count.
    """
    values = np.concatenate([np.zeros(0), *rows])
    values = values[~np.isnan(values)]
    mean, std = float(values.mean()) if len(values) else 0.0, spread(values, algorithm)

    def whiten(advantages: np.ndarray) -> np.ndarray:
        whitened = (advantages - mean) / (std + algorithm.advantage_eps)
        # The rounding of a mean that is 0 in truth must not give signal to groups that have none.
        return np.where((np.abs(whitened) < ROUNDING) | (std == 0), 0.0, whitened)

    return whiten, std


def _trained_rows(groups: Sequence[ScoredGroup], algorithm: AlgorithmConfig) -> list[np.ndarray]:
    """Return the advantages of each completion that is graded and trained: `[1]`, or `[turns]`."""
    trained = []
    for group in groups:
        rows = group.turn_advantages or np.split(group.advantages, len(group.advantages))
        for number, completion in enumerate(group.rollout.completions):
            if number not in group.errors and not (algorithm.mask_truncated and completion.is_truncated):
                trained.append(rows[number])
    return trained


def _settled(sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
    """Return the sequences with 0 for NaN."""
    settled = []
    for s in sequences:
        advantage = np.nan_to_num(np.asarray(s.advantage, np.float32))
        settled.append(replace(s, advantage=advantage if advantage.ndim else float(advantage)))
    return settled


def _changed(group: ScoredGroup, change: Callable[[np.ndarray], np.ndarray]) -> ScoredGroup:
    """Return the group with changed advantages; ungraded responses keep 0."""

    def changed(advantages: np.ndarray) -> np.ndarray:
        return change(advantages.astype(np.float64)).astype(np.float32)

    return replace(
        group,
        advantages=np.where(group.is_graded, changed(group.advantages), np.float32(0)),
        turn_advantages=tuple(map(changed, group.turn_advantages)),
    )


def _lengths(completions: Sequence[Completion]) -> np.ndarray:
    return np.array([len(completion.token_ids) for completion in completions])
