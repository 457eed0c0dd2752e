"""Returns and advantages of a group of episodes."""

from functools import partial

import numpy as np
import pytest
from episode_groups import make_episode, make_episode_group, play
from hypothesis import given
from hypothesis import strategies as st

from grpo_ray.config.algorithm import AlgorithmConfig
from grpo_ray.episodes.segments import Segments
from grpo_ray.objectives.returns import discounted_returns, episode_advantages, turn_advantages

REWARDS = st.lists(st.floats(-5, 5), min_size=1, max_size=8)


@given(REWARDS, st.floats(0, 1))
def test_returns_are_discounted_sums(rewards: list[float], discount: float) -> None:
    expected = [
        sum(discount ** (later - turn) * rewards[later] for later in range(turn, len(rewards)))
        for turn in range(len(rewards))
    ]
    assert np.allclose(discounted_returns(rewards, discount), expected)


def test_a_discount_outside_its_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"discount must be between 0 and 1, got 1\.5"):
        discounted_returns([1.0], 1.5)


def test_episodes_without_a_reward_leave_the_baseline() -> None:
    advantages = episode_advantages([1.0, None, 0.0, None, 0.0, 1.0], AlgorithmConfig(advantage="mean"))
    assert advantages.tolist() == [0.5, 0, -0.5, 0, -0.5, 0.5]
    assert advantages.dtype == np.float32
    assert episode_advantages([None, None], AlgorithmConfig()).tolist() == [0, 0]
    rloo = AlgorithmConfig(advantage="leave_one_out")
    assert episode_advantages([None, 2.0], rloo).tolist() == [0, 0]
    assert episode_advantages([3.0, None, 1.0], rloo).tolist() == [2, 0, -2]


def test_turns_are_compared_with_the_same_turn_of_other_episodes() -> None:
    compare = partial(episode_advantages, algorithm=AlgorithmConfig(advantage="mean"))
    advantages = turn_advantages([[0.0, 1.0], [0.0, 0.0], None, [1.0]], discount=0.5, compare=compare)
    # Returns: [0.5, 1], [0, 0] and [1].
    assert [a.tolist() for a in advantages] == [[0.0, 0.5], [-0.5, -0.5], [], [0.5]]


def test_a_group_has_signal_by_the_advantages_that_are_trained() -> None:
    """Rewards per turn replace the episode's: equal ones leave nothing to train, whatever the rewards are."""
    segments = [Segments(), Segments()]
    for each in segments:
        play(each, [1], [2])
    pairs = zip(segments, (0.0, 1.0), strict=True)
    group = make_episode_group(0, [make_episode(s, reward, turn_rewards=(0.5,)) for s, reward in pairs])
    assert np.any(group.advantages)
    assert not group.has_signal
