"""Segments of an episode: exact paths, each sampled token trained once; returns and advantages of a group."""

import numpy as np
import pytest
from builders import make_completion
from episode_groups import make_episode, make_episode_group, play
from hypothesis import given
from hypothesis import strategies as st

from grpo_ray.config.algorithm import AlgorithmConfig
from grpo_ray.episodes.segments import Segments, TrainedPath
from grpo_ray.learning.families import NO_PARENT
from grpo_ray.objectives.returns import compare_episodes, discounted_returns
from grpo_ray.types import CONTEXT

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=4)  # few tokens, so that paths often agree


def rows(sequence: TrainedPath) -> tuple[list[int], list[int], list[int]]:
    mask = sequence.mask.astype(int).tolist()
    return list(sequence.prompt_token_ids), sequence.response_token_ids.tolist(), mask


def test_turns_that_continue_are_one_sequence() -> None:
    segments = Segments()
    play(segments, [1, 2], [3, 4], 5)
    play(segments, [1, 2, 3, 4, 9, 9], [6], 7)
    (sequence,) = segments.sequences()
    assert rows(sequence) == ([1, 2], [3, 4, 9, 9, 6], [1, 1, 0, 0, 1])
    assert sequence.versions.tolist() == [5, 5, CONTEXT, CONTEXT, 7]
    assert sequence.turns.tolist() == [0, 0, CONTEXT, CONTEXT, 1]
    assert sequence.logprobs.tolist() == [-1, -1, 0, 0, -1]
    assert [segments[i].parent for i in range(len(segments))] == [NO_PARENT, 0, 1, 2]


def test_a_rewritten_history_branches_after_the_whole_segments_that_agree() -> None:
    segments = Segments()
    play(segments, [1, 2], [3, 4])
    play(segments, [1, 2, 4, 9], [6])  # without the reply's first token
    play(segments, [1, 2, 3, 4, 8], [7])
    rewritten, kept = ([1, 2, 4, 9], [6], [1]), ([1, 2], [3, 4, 8, 7], [1, 1, 0, 1])
    assert [rows(s) for s in segments.sequences()] == [rewritten, kept]


def test_what_branches_share_is_trained_in_the_first() -> None:
    segments = Segments()
    play(segments, [1], [2])
    play(segments, [1, 2, 5], [3])
    play(segments, [1, 2, 6], [4])
    assert [rows(s) for s in segments.sequences()] == [([1], [2, 5, 3], [1, 0, 1]), ([1, 2, 6], [4], [1])]


def test_a_context_that_nothing_was_sampled_after_is_not_trained() -> None:
    segments = Segments()
    play(segments, [1], [2])
    segments.add_prompt([1, 2, 5])  # its sampling failed
    assert [rows(s) for s in segments.sequences()] == [([1], [2], [1])]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        Segments().add_prompt([])


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9), TOKENS, TOKENS), min_size=1, max_size=12))
def test_every_sampled_token_is_trained_once(turns: list[tuple[int, int, list[int], list[int]]]) -> None:
    """Prompts continue any earlier path, cut anywhere, by any tokens."""
    segments, replies = Segments(), []
    for number, (chosen, num_cut, new, reply) in enumerate(turns):
        known = list(segments.token_ids(chosen % len(segments))) if len(segments) else []
        prompt = [*known[: max(0, len(known) - num_cut)], *new]
        parent = segments.add_prompt(prompt)
        assert list(segments.token_ids(parent)) == prompt
        logprobs = [-(number + index / 100) for index in range(len(reply))]
        segments.add_sample(parent, make_completion(reply, logprobs, versions=number))
        replies.append((prompt, reply, logprobs))
    trained = []
    for sequence in segments.sequences():
        whole = np.concatenate([sequence.prompt_token_ids, sequence.response_token_ids]).tolist()
        start = len(sequence.prompt_token_ids)
        assert sequence.mask[0]
        assert sequence.mask[-1]
        assert (sequence.versions[~sequence.mask] == CONTEXT).all()
        for number in np.unique(sequence.turns[sequence.mask]):
            prompt, reply, logprobs = replies[number]
            places = np.flatnonzero(sequence.turns == number)
            assert whole[: start + places[0]] == prompt
            assert sequence.response_token_ids[places].tolist() == reply
            assert np.allclose(sequence.logprobs[places], logprobs)
            assert (sequence.versions[places] == number).all()
            trained.append(int(number))
    assert sorted(trained) == list(range(len(turns)))


# ---- returns and advantages of a group of episodes ----


REWARDS = st.lists(st.floats(-5, 5), min_size=1, max_size=8)


@given(REWARDS, st.floats(0, 1))
def test_returns_are_discounted_sums(rewards: list[float], discount: float) -> None:
    turns = range(len(rewards))
    expected = [sum(discount ** (later - turn) * rewards[later] for later in turns[turn:]) for turn in turns]
    assert np.allclose(discounted_returns(rewards, discount), expected)


def test_a_discount_outside_its_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"discount must be between 0 and 1, got 1\.5"):
        discounted_returns([1.0], 1.5)


def test_episodes_without_a_reward_leave_the_baseline() -> None:
    mean, rloo = AlgorithmConfig(advantage="mean"), AlgorithmConfig(advantage="leave_one_out")
    advantages, of_turns = compare_episodes([1.0, None, 0.0, None, 0.0, 1.0], None, mean, 1.0)
    assert advantages.tolist() == [0.5, 0, -0.5, 0, -0.5, 0.5]
    assert advantages.dtype == np.float32
    assert of_turns == ()
    for rewards, expected in (([None, None], [0, 0]), ([None, 2.0], [0, 0]), ([3.0, None, 1.0], [2, 0, -2])):
        assert compare_episodes(rewards, None, rloo, 1.0)[0].tolist() == expected
    assert compare_episodes([None, None], None, AlgorithmConfig(), 1.0)[0].tolist() == [0, 0]


def test_turns_are_compared_with_the_same_turn_of_other_episodes() -> None:
    turn_rewards, mean = [[0.0, 1.0], [0.0, 0.0], None, [1.0]], AlgorithmConfig(advantage="mean")
    _, advantages = compare_episodes([1.0, 0.0, None, 1.0], turn_rewards, mean, turn_discount=0.5)
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
