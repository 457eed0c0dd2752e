"""From the rewards of turns and the penalties of tokens to returns, and of a group of episodes to advantages.

A group's episodes begin in the same state.
"""

from collections.abc import Sequence

import numpy as np

from grpo_ray.config.algorithm import AlgorithmConfig
from grpo_ray.objectives.comparison import advantages_of
from grpo_ray.types import Episode, Verdict


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


def compare_episodes(
    rewards: Sequence[float | None], turn_rewards: Sequence[Sequence[float] | None] | None,
    algorithm: AlgorithmConfig, turn_discount: float, format_rewards: np.ndarray | None = None,
    answer_rewards: np.ndarray | None = None, lengths: np.ndarray | None = None,
) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:  # fmt: skip
    """Compare each episode's reward with its group's, and each turn's discounted return with the same turn's.

    An episode without a reward (`Episode.reward` is None) has advantage 0 and is no part of the baseline;
    neither has one that is left to be compared with none. A turn that only one episode reached has no other to
    compare with: its advantage is that of a group of 1.

    Args:
        rewards: of each episode.
        turn_rewards: of each episode, one per turn; None leaves an episode out. None: no episode has any.
        format_rewards, answer_rewards: as for `advantages_of`.
        lengths: of each episode, sampled tokens; None: 1.

    Returns:
        The advantages, float32 `[G]`; and those of each episode's turns, float32 `[turns]`, empty if it is left
        out. Without rewards per turn there are none of these.
    """
    num_tokens = np.ones(len(rewards)) if lengths is None else lengths

    def compared(values: Sequence[float | None]) -> np.ndarray:
        is_graded = np.array([value is not None for value in values], bool)
        known = np.array([0.0 if value is None else value for value in values], np.float32)
        return advantages_of(known, num_tokens, is_graded, algorithm, None, format_rewards, answer_rewards)

    returns = [discounted_returns(own or (), turn_discount) for own in turn_rewards or ()]
    of_turns = tuple(np.zeros(len(own), np.float32) for own in returns)
    for turn in range(max(map(len, returns), default=0)):
        column = [float(own[turn]) if turn < len(own) else None for own in returns]
        for own, advantage in zip(of_turns, compared(column), strict=True):
            own[turn : turn + 1] = advantage
    return compared(rewards), of_turns


def verdict_on(episodes: Sequence[Episode], algorithm: AlgorithmConfig, turn_discount: float) -> Verdict:
    """Return the verdict on a group's episodes, which bring their rewards along.

    One that finished by itself counts as well-formed, one with a positive reward as right.
    """
    known = np.array([episode.reward or 0.0 for episode in episodes], np.float32)
    formats = np.array([episode.status == "finished" for episode in episodes], np.float32)
    answers = (known > 0).astype(np.float32)
    rewards, lengths = [e.reward for e in episodes], np.array([e.num_tokens for e in episodes])
    advantages, of_turns = compare_episodes(
        rewards, turn_rewards_of(episodes), algorithm, turn_discount, formats, answers, lengths
    )
    return Verdict(
        rewards=known,
        format_rewards=formats,
        answer_rewards=answers,
        advantages=advantages,
        errors={n: e.error or e.status for n, e in enumerate(episodes) if e.reward is None},
        turn_advantages=of_turns,
    )


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
