"""Segments of an episode: exact paths, each sampled token trained once; advantages; rollouts on disk."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from builders import make_completion, make_group, make_item, same_groups, simple_group
from episode_groups import branched_episode, make_episode, make_episode_group, play, random_episode_group
from hypothesis import given
from hypothesis import strategies as st

from grpo_ray.config.algorithm import AlgorithmConfig
from grpo_ray.episodes.segments import Segments, TrainedPath
from grpo_ray.learning.families import NO_PARENT
from grpo_ray.objectives.returns import compare_episodes, discounted_returns
from grpo_ray.records.episode_columns import NAMES
from grpo_ray.records.rollout_log import read_groups, read_rollouts, read_uses, write_rollouts
from grpo_ray.types import CONTEXT, ScoredGroup

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


# ---- rollouts: nothing is lost, the columns can be read, and other files do not grow ----


def read_back(path: Path, *groups: ScoredGroup) -> tuple[ScoredGroup, ...]:
    write_rollouts(path / "rollouts.parquet", 1, groups)
    return read_groups(path / "rollouts.parquet")


@pytest.mark.parametrize("seed", range(30))
def test_random_episodes_come_back_bit_for_bit(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    discounts = [None, 0.0, 0.5, 1.0]
    groups = [random_episode_group(rng, n, discount=discounts[seed % 4], version=3) for n in range(3)]
    found = read_back(tmp_path, *groups)
    assert same_groups(found, groups)
    for episode in (episode for group in found for episode in group.rollout.completions):
        for array in (episode.token_ids, episode.logprobs, episode.versions, episode.turns):  # each its own
            assert array.base is None or array.base.nbytes <= 4 * array.nbytes


def test_a_file_may_hold_episodes_and_responses(tmp_path: Path) -> None:
    """Write groups like those of a mixture of tasks."""
    rng = np.random.default_rng(0)
    empty = make_group(make_item(3), [make_completion([])], [0.0])
    groups = [simple_group(0, [2, 3, 3]), random_episode_group(rng, 1, discount=0.9), empty,
              random_episode_group(rng, 4)]  # fmt: skip
    assert same_groups(read_back(tmp_path, *groups), groups)
    path = tmp_path / "rollouts.parquet"
    assert read_uses(path) == [1, 1, 1, 1]
    first = read_rollouts(path)[0]
    assert {name: first[name] for name in NAMES} == dict.fromkeys(NAMES)


def test_odd_values_come_back(tmp_path: Path) -> None:
    segments = Segments()
    play(segments, [1], [2], logprobs=[-np.inf])
    odd = make_episode(
        segments, -0.0, status="truncated_turns", text="\N{PILE OF POO}", seconds=1e-300, turn_rewards=[0.1],
        metrics={"b": 1 / 3, "a": -0.0}, error="Traceback\n\0",
    )  # fmt: skip
    unsampled = make_episode(Segments(), None, status="environment_error", turn_rewards=())
    group = make_episode_group(7, [odd, unsampled])
    group = replace(group, turn_advantages=(np.array([0.1], np.float32), np.zeros(0, np.float32)))
    (found,) = read_back(tmp_path, group)
    assert same_groups([found], [group])
    (first, second) = found.rollout.completions
    assert list(first.metrics) == ["b", "a"]
    assert (second.num_turns, second.num_tokens, second.sequences) == (0, 0, ())


def test_a_row_can_be_read_without_this_package(tmp_path: Path) -> None:
    rewards = {"reward": 0.75, "turn_rewards": [0.25, 0.0, 0.5]}
    episode = branched_episode((0, 1, 2), **rewards, seconds=2.5, metrics={"guesses": 3.0})
    bad = make_episode(Segments(), None, status="environment_error", error="Traceback: boom")
    read_back(tmp_path, make_episode_group(4, [episode, episode, bad], discount=1.0))
    row, _, failed = pq.read_table(tmp_path / "rollouts.parquet").to_pylist()
    counts = {"num_tokens": 5, "num_turns": 3, "num_branches": 1, "num_context_tokens": 2}
    assert {**row, **counts, "min_version": 0, "max_version": 2} == row
    assert (row["status"], row["episode_reward"], row["seconds"]) == ("finished", 0.75, 2.5)
    assert dict(row["metrics"]) == {"guesses": 3.0}
    assert row["turn_rewards"] == [0.25, 0.0, 0.5]
    assert row["turn_advantages"] == [0.0, 0.0, 0.0]  # both alike
    sampled = {s["turn"]: row["token_ids"][s["start"] : s["end"]] for s in row["turns"]}
    assert sampled == {0: [3, 4], -1: [9, 9], 1: [6, 7], 2: [5]}
    assert [span["version"] for span in row["versions"]] == [0, -1, 1, 2]
    assert [(s["prompt_token_ids"], s["start"], s["end"]) for s in row["sequences"]] == [
        ([1, 2], 0, 6), ([1, 2, 3, 4, 8], 6, 7),
    ]  # fmt: skip
    assert (failed["status"], failed["episode_error"]) == ("environment_error", "Traceback: boom")
    assert failed["error"] == "Traceback: boom"  # its verdict
    assert (failed["episode_reward"], failed["min_version"]) == (None, None)


def test_a_file_without_episodes_does_not_grow(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "plain.parquet", 1, [simple_group(0)])
    names = pq.read_schema(tmp_path / "plain.parquet").names
    assert not set(names) & set(NAMES)
    assert names[-1] == "versions"
