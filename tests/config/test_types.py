"""Groups as messages: one array of each kind, and the same group on arrival."""

import pickle
import sys
from dataclasses import replace

import numpy as np
import pytest
from builders import make_completion, make_group, make_item, parts, same_groups
from episode_groups import make_episode, make_episode_group, play

from grpo_ray.episodes.segments import Segments
from grpo_ray.types import RolloutGroup, ScoredGroup

COMPLETIONS = (
    make_completion([5, 6, 7], [-0.5, -0.0, float("nan")], [3, 3, 4], "é…", "length"),
    make_completion([9], [-2.5], 4, "b"),
    make_completion([1, 2], [-1.0, -2.0], [2, 4]),
)
GROUP = make_group(make_item(7, num_cuts=2), COMPLETIONS, [1, 0, 0.5], [0.3, -0.1, 0.0])


def test_a_group_travels_as_three_arrays_and_arrives_as_it_was() -> None:
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(GROUP.rollout, protocol=5, buffer_callback=buffers.append)
    assert [len(buffer.raw()) for buffer in buffers] == [6 * 4] * 3
    arrived = pickle.loads(data, buffers=buffers)
    assert type(arrived) is RolloutGroup
    assert same_groups([replace(GROUP, rollout=arrived)], [GROUP])
    first, second, _ = arrived.completions
    assert np.shares_memory(first.token_ids.base, second.token_ids.base)


@pytest.mark.parametrize("completions", [(), COMPLETIONS[:1]])
def test_small_groups_travel_too(completions: tuple[object, ...]) -> None:
    group = make_group(make_item(), completions)  # type: ignore[arg-type]
    assert same_groups([pickle.loads(pickle.dumps(group))], [group])


def test_the_bytes_of_a_group_have_the_prompts_of_its_branches() -> None:
    """A second sequence of 1,000 prompt tokens costs what its tuple and its numbers take in Python."""
    prompt = tuple(range(1000, 2000))
    once, branched = Segments(), Segments()
    for segments in (once, branched):
        play(segments, (1, 2), [5, 6])
    play(branched, prompt, [7])
    one, other = (make_episode_group(0, [make_episode(segments)] * 2) for segments in (once, branched))
    of_prompt = sum(map(sys.getsizeof, prompt)) + sys.getsizeof(prompt) - sys.getsizeof(())
    of_token = 4 * 4  # its id, logprob, version and turn
    assert other.num_bytes - one.num_bytes == 2 * (of_prompt + of_token)


def test_a_group_and_its_verdict_are_a_scored_group() -> None:
    group = replace(GROUP, errors={1: "too slow"}, ungradable={2: "too deep"})
    rollout, verdict = parts(group)
    assert same_groups([ScoredGroup.of(rollout, verdict)], [group])
