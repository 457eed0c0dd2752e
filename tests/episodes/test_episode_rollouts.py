"""Rollouts of episodes on disk: nothing is lost, the columns can be read, and other files do not grow."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from builders import make_completion, make_group, make_item, same_groups, simple_group
from episode_groups import branched_episode, make_episode, make_episode_group, play, random_episode_group

from grpo_ray.episodes.segments import Segments
from grpo_ray.records.episode_columns import NAMES
from grpo_ray.records.rollout_log import read_groups, read_rollouts, read_uses, write_rollouts
from grpo_ray.types import ScoredGroup


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
    shown = ("num_tokens", "num_turns", "num_branches", "num_context_tokens", "min_version", "max_version")
    assert {name: row[name] for name in shown} == {
        "num_tokens": 5, "num_turns": 3, "num_branches": 1, "num_context_tokens": 2, "min_version": 0,
        "max_version": 2,
    }  # fmt: skip
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
