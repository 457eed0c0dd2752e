"""From the rewards of turns and the penalties of tokens to returns, and of a group of episodes to advantages.

A group's episodes begin in the same state.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from grpo_ray.config.algorithm import AlgorithmConfig
from grpo_ray.objectives.comparison import advantages_of
from grpo_ray.types import CONTEXT, Episode, Verdict


def discounted_returns(turn_rewards: Sequence[float], discount: float) -> np.ndarray:
    """Return `R_t = r_t + discount * R_(t+1)` of each turn, float64 `[turns]`.

    Raises:
        ValueError: the discount is outside [0, 1].
    """
    if not 0 <= discount <= 1:
        raise ValueError(f"discount must be between 0 and 1, got {discount}")
    returns = np.zeros(len(turn_rewards))
    later = 0.0
    for turn in reversed(range(len(turn_rewards))):
        returns[turn] = later = turn_rewards[turn] + discount * later
    return returns


def penalties_to_go(penalties: np.ndarray, turns: np.ndarray, discount: float) -> np.ndarray:
    """Return each token's penalty plus those of all later tokens, `sum over i >= t of p_i`, float64 `[tokens]`.

    (REINFORCE++ arXiv:2501.03262: `A_t = r - coefficient * sum over i >= t of KL_i`.) A later turn counts
    `discount` times per turn in between, as its rewards do.

    Args:
        turns: `[tokens]`, the turn of each token, from 0.
    """
    to_go, later = np.zeros(len(penalties)), 0.0
    for turn in reversed(range(int(turns.max(initial=-1)) + 1)):
        own = turns == turn
        to_go[own] = np.cumsum(penalties[own][::-1])[::-1] + discount * later
        later = penalties[own].sum() + discount * later
    return to_go


def episode_advantages(
    rewards: Sequence[float | None], algorithm: AlgorithmConfig, format_rewards: np.ndarray | None = None,
    answer_rewards: np.ndarray | None = None, lengths: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """Compare each episode's reward with its group's, float32 `[G]`; see `advantages_of`.

    An episode without a reward (`EpisodeResult.reward` is None) has advantage 0 and is no part of the baseline;
    neither has one that is left to be compared with none.
    """
    is_graded = np.array([reward is not None for reward in rewards], bool)
    known = np.array([0.0 if reward is None else reward for reward in rewards], np.float32)
    lengths = np.ones(len(known)) if lengths is None else lengths
    return advantages_of(known, lengths, is_graded, algorithm, None, format_rewards, answer_rewards)


def turn_advantages(
    turn_rewards: Sequence[Sequence[float] | None], discount: float,
    compare: Callable[[Sequence[float | None]], np.ndarray],
) -> list[np.ndarray]:  # fmt: skip
    """Compare each turn's discounted return with those of the same turn in the group's other episodes.

    A turn that only one episode reached has no other to compare with: its advantage is that of a group of 1.

    Args:
        turn_rewards: of each episode, one per turn; None leaves an episode out, as in `episode_advantages`.
        compare: `episode_advantages` with its options.

    Returns:
        Of each episode float32 `[turns]`, empty for None.
    """
    returns = [discounted_returns(rewards or (), discount) for rewards in turn_rewards]
    advantages = [np.zeros(len(own), np.float32) for own in returns]
    for turn in range(max(map(len, returns), default=0)):
        column = [float(own[turn]) if turn < len(own) else None for own in returns]
        for own, advantage in zip(advantages, compare(column), strict=True):
            own[turn : turn + 1] = advantage
    return advantages


def verdict_on(episodes: Sequence[Episode], algorithm: AlgorithmConfig, turn_discount: float) -> Verdict:
    """Return the verdict on a group's episodes, which bring their rewards along.

    One that finished by itself counts as well-formed, one with a positive reward as right.
    """
    known = np.array([episode.reward or 0.0 for episode in episodes], np.float32)
    formats = np.array([episode.status == "finished" for episode in episodes], np.float32)
    answers = (known > 0).astype(np.float32)
    advantages, of_turns = compare_episodes(episodes, formats, answers, algorithm, turn_discount)
    return Verdict(
        rewards=known,
        format_rewards=formats,
        answer_rewards=answers,
        advantages=advantages,
        errors={n: e.error or e.status for n, e in enumerate(episodes) if e.reward is None},
        turn_advantages=of_turns,
    )


def compare_episodes(
    episodes: Sequence[Episode], format_rewards: np.ndarray, answer_rewards: np.ndarray,
    algorithm: AlgorithmConfig, turn_discount: float,
) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:  # fmt: skip
    """Return a group's advantages `[G]`, and those of its turns if an episode has rewards per turn."""
    compare = partial(
        episode_advantages,
        algorithm=algorithm,
        format_rewards=format_rewards,
        answer_rewards=answer_rewards,
        lengths=np.array([np.count_nonzero(episode.turns != CONTEXT) for episode in episodes]),
    )
    advantages = compare([episode.reward for episode in episodes])
    per_turn = turn_rewards_of(episodes)
    return advantages, () if per_turn is None else tuple(turn_advantages(per_turn, turn_discount, compare))


def turn_rewards_of(episodes: Sequence[Episode]) -> list[Sequence[float] | None] | None:
    """Return each episode's rewards per turn; None if no episode of the group has them."""
    if all(episode.turn_rewards is None for episode in episodes):
        return None
    return [rewards_per_turn(e.reward, e.turn_rewards, e.num_turns) for e in episodes]


def rewards_per_turn(
    reward: float | None, turn_rewards: Sequence[float] | None, num_turns: int
) -> Sequence[float] | None:
    """Return one reward per turn; an episode without any, such as one cut off, has its reward in the last."""
    if reward is None or turn_rewards is not None:
        return turn_rewards
    return (*[0.0] * (num_turns - 1), reward)[:num_turns]
