"""The replay memory: which groups it holds, and which it draws, and how often."""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders import check_names, make_completion, make_group, make_item, simple_group

from grpo_ray.config.schedule import ReplayConfig
from grpo_ray.core.replay import ReplayMemory
from grpo_ray.types import CONTEXT, ScoredGroup

LONG = {"max_age": 1000, "max_uses": 1000}


def make_memory(num_drawn: int = 2, seed: int = 0, **config: Any) -> ReplayMemory:
    return ReplayMemory(ReplayConfig.model_validate({**LONG, **config}), num_drawn, seed)


def held(memory: ReplayMemory) -> dict[int, int]:
    """Return the number of uses of each group in memory."""
    return {replayed.group.group_id: replayed.num_uses for replayed in memory.contents(99)}


def drawn(memory: ReplayMemory, version: int) -> list[tuple[int, int]]:
    return [(replayed.group.group_id, replayed.num_uses) for replayed in memory.draw(version)]


def evicted(memory: ReplayMemory) -> tuple[float, ...]:
    """Return the evictions for age, uses and room since the last call."""
    metrics = memory.take_metrics()
    return tuple(metrics[f"replay/evicted_{cause}"] for cause in ("age", "uses", "room"))


def with_advantages(group_id: int, advantages: Sequence[float]) -> ScoredGroup:
    completions = [make_completion([5, 6])] * len(advantages)
    return make_group(make_item(group_id), completions, [0.0] * len(advantages), advantages)


def test_a_draw_that_was_not_trained_is_not_counted() -> None:
    """A checkpoint of version 5 excludes the draw of step 6, even if that has been made; version 6 has it."""
    memory = make_memory(max_uses=2, max_age=4)
    memory.add([simple_group(0, versions=0), simple_group(1, versions=4), simple_group(2, versions=4)])
    assert drawn(memory, 5) == [(1, 2), (2, 2)]  # both are used up now, and 0 is too old
    memory.add([simple_group(3, versions=5)])
    assert {r.group.group_id: r.num_uses for r in memory.contents(5)} == {0: 1, 1: 1, 2: 1}
    assert {r.group.group_id: r.num_uses for r in memory.contents(6)} == {3: 1}


def test_groups_that_were_trained_are_held_as_used_once_and_once_if_trained_again_as_fresh() -> None:
    memory = make_memory()
    assert (len(memory), memory.contents(99), memory.draw(0)) == (0, (), ())
    memory.add([simple_group(3), simple_group(1)])
    assert held(memory) == {3: 1, 1: 1}
    metrics = memory.take_metrics()
    assert metrics["replay/groups"] == 2.0
    assert metrics["replay/bytes"] == 2 * simple_group(1).num_bytes
    assert check_names(metrics) == []
    memory.add([simple_group(3, versions=2)])
    assert held(memory) == {3: 1, 1: 1}
    assert [each.group.rollout.oldest_version for each in memory.contents(99)] == [0, 2]
    assert memory.take_metrics()["replay/bytes"] == 2 * simple_group(1).num_bytes


def test_nothing_is_held_when_nothing_is_drawn() -> None:
    memory = make_memory(num_drawn=0)
    memory.add([simple_group(3)])
    assert (len(memory), memory.draw(0), memory.take_metrics()) == (0, (), {})


def test_oldest_groups_make_room_for_others() -> None:
    memory = make_memory(max_groups=3)
    memory.add([simple_group(g) for g in (5, 2, 7)])
    memory.add([simple_group(9)])
    assert list(held(memory)) == [2, 7, 9]  # in the order of their first use
    memory.add([simple_group(g) for g in (10, 11)])
    assert list(held(memory)) == [9, 10, 11]
    assert evicted(memory) == (0, 0, 3)
    assert evicted(memory) == (0, 0, 0)  # reported once


def test_being_drawn_does_not_make_a_group_younger() -> None:
    memory = make_memory(num_drawn=1, max_groups=2, sampling="recent")
    memory.add([simple_group(1, versions=9), simple_group(2)])
    assert drawn(memory, 10) == [(1, 2)]
    memory.add([simple_group(3)])
    assert held(memory) == {2: 1, 3: 1}


def test_bytes_are_bounded() -> None:
    size = simple_group(0).num_bytes
    memory = make_memory(max_gib=(3 * size + 1) / 2**30)
    memory.add([simple_group(g) for g in range(5)])
    assert list(held(memory)) == [2, 3, 4]
    assert memory.take_metrics()["replay/bytes"] == 3 * size
    large = make_group(make_item(8), [make_completion(range(500))])
    assert large.num_bytes > 3 * size
    memory.add([large])
    assert held(memory) == {}  # too large even on its own
    assert memory.take_metrics()["replay/bytes"] == 0.0


def test_no_group_is_drawn_beyond_max_age() -> None:
    memory = make_memory(num_drawn=9, max_age=3)
    memory.add([simple_group(0, versions=1), simple_group(1, versions=[2, 1, 5]), simple_group(2, versions=2)])
    assert drawn(memory, 4) == [(0, 2), (1, 2), (2, 2)]  # version 1 is 3 versions old at version 4
    assert evicted(memory) == (0, 0, 0)
    assert drawn(memory, 5) == [(2, 3)]  # one token that is too old excludes a group
    assert held(memory) == {2: 3}
    assert evicted(memory) == (2, 0, 0)


def test_no_group_is_drawn_beyond_max_uses() -> None:
    memory = make_memory(num_drawn=2, max_uses=3)
    memory.add([simple_group(0), simple_group(1)])
    assert drawn(memory, 1) == [(0, 2), (1, 2)]
    assert held(memory) == {0: 2, 1: 2}
    assert drawn(memory, 2) == [(0, 3), (1, 3)]
    assert drawn(memory, 3) == []
    assert evicted(memory) == (0, 2, 0)
    assert memory.take_metrics()["replay/bytes"] == 0.0


# ---- which groups are drawn ----


@pytest.mark.parametrize("sampling", ["uniform", "recent", "advantage"])
def test_ties_are_broken_by_the_group_s_id(sampling: str) -> None:
    """Equal ranks must not lead to a comparison of groups, because arrays cannot be compared."""
    memory = make_memory(num_drawn=2, sampling=sampling)
    memory.add([with_advantages(g, [0.0, 0.0]) for g in (7, 3, 5, 1)])
    chosen = drawn(memory, 1)
    if sampling != "uniform":
        assert chosen == [(1, 2), (3, 2)]


def test_recent_are_those_with_the_newest_oldest_token() -> None:
    memory = make_memory(num_drawn=2, sampling="recent")
    versions: dict[int, int | list[int]] = {0: 4, 1: [9, 9, 2], 2: 5, 3: [5, 6, 6], 4: 3}
    memory.add([simple_group(g, versions=v) for g, v in versions.items()])
    assert drawn(memory, 10) == [(2, 2), (3, 2)]
    memory.add([simple_group(6, versions=7)])
    assert drawn(memory, 11) == [(2, 3), (6, 2)]


@pytest.mark.parametrize("sampling", ["uniform", "recent", "advantage"])
def test_a_group_without_a_sampled_token_is_not_held(sampling: str) -> None:
    """Such as one of episodes with `over_age: mask` of which all tokens were too old."""
    memory = make_memory(num_drawn=2, sampling=sampling)
    masked, half = simple_group(0, versions=CONTEXT), simple_group(1, versions=[CONTEXT, 3, 3])
    memory.add([masked, half, simple_group(2, versions=2)])
    assert memory.take_metrics()["replay/bytes"] == 2 * half.num_bytes
    assert drawn(memory, 4) == [(1, 2), (2, 2)]


NUM_SEEDS = 3000
Frequencies = dict[tuple[int, ...], float]  # by set of groups


def frequencies(groups: Sequence[ScoredGroup], num_drawn: int, sampling: str) -> Frequencies:
    """Return how often each set of groups is drawn, over many seeds."""
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(NUM_SEEDS):
        memory = make_memory(num_drawn, seed, sampling=sampling)
        memory.add(groups)
        counts[tuple(g for g, _ in drawn(memory, 1))] += 1
    return {chosen: count / NUM_SEEDS for chosen, count in counts.items()}


def check_frequencies(actual: Frequencies, expected: Frequencies) -> None:
    """Check that the frequencies agree to within five standard deviations."""
    assert actual.keys() <= expected.keys()
    for chosen, p in expected.items():
        assert abs(actual.get(chosen, 0.0) - p) <= 5 * math.sqrt(p * (1 - p) / NUM_SEEDS), chosen


@pytest.mark.slow
def test_uniform_draws_every_set_equally_often() -> None:
    groups = [with_advantages(g, [10.0**g, 0.0]) for g in range(4)]
    expected: Frequencies = dict.fromkeys(itertools.combinations(range(4), 2), 1 / 6)
    check_frequencies(frequencies(groups, 2, "uniform"), expected)


WEIGHTS = (1.0, 2.0, 5.0)
BY_WEIGHT = [
    with_advantages(0, [1.5, -0.5]),  # the weights are the means of |advantage|
    with_advantages(1, [-2.0, -2.0]),
    with_advantages(2, [0.0, 10.0]),
    with_advantages(3, [0.0, 0.0]),
]


@pytest.mark.slow
def test_by_advantage_draws_several_one_after_another() -> None:
    """Draws are without replacement: the second is in proportion among the remaining groups."""
    expected: Frequencies = defaultdict(float)
    for first, second in itertools.permutations(range(3), 2):
        p = WEIGHTS[first] / sum(WEIGHTS) * WEIGHTS[second] / (sum(WEIGHTS) - WEIGHTS[first])
        expected[tuple(sorted((first, second)))] += p
    assert sum(expected.values()) == pytest.approx(1)
    check_frequencies(frequencies(BY_WEIGHT, 2, "advantage"), expected)


@pytest.mark.slow
def test_group_without_advantage_is_drawn_last() -> None:
    assert frequencies(BY_WEIGHT, 3, "advantage") == {(0, 1, 2): 1.0}
    memory = make_memory(4, sampling="advantage")
    memory.add(BY_WEIGHT)
    assert [g for g, _ in drawn(memory, 1)] == [0, 1, 2, 3]
    of_turns = replace(with_advantages(4, [0.0]), turn_advantages=(np.array([1.0, -1.0]),))
    assert frequencies([BY_WEIGHT[3], of_turns], 1, "advantage") == {(4,): 1.0}


# ---- repeated draws ----


@pytest.mark.parametrize("sampling", ["uniform", "recent", "advantage"])
def test_same_seed_and_version_draw_the_same(sampling: str) -> None:
    """A draw depends on the seed and the version, so a checkpoint needs no random state."""

    def draws(seed: int, arrival: Sequence[int], versions: Sequence[int] = range(1, 8)) -> list[list[int]]:
        memory = make_memory(3, seed, sampling=sampling)
        memory.add([with_advantages(g, [1.0 + g % 3, -1.0]) for g in arrival])
        return [[group_id for group_id, _ in drawn(memory, version)] for version in versions]

    ids = list(range(12))
    first = draws(0, ids)
    assert draws(0, ids[::-1]) == first  # whichever was trained first
    assert draws(0, ids, [7]) == first[-1:]  # whatever was drawn before
    if sampling != "recent":
        assert draws(1, ids) != first
        assert len(set(map(tuple, first))) > 1  # a new draw for each version
