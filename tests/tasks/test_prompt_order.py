"""The order of a mixture: parts in proportion to their weights, each in epochs of its own."""

import json
import random
from collections import Counter
from typing import Any

import pytest

from grpo_ray.config.task import CurriculumConfig, MixtureTaskConfig
from grpo_ray.tasks import make_order
from grpo_ray.tasks.curriculum import CurriculumOrder
from grpo_ray.tasks.prompt_order import EpochOrder, MixtureOrder

SIZES = {"a": 3, "b": 5, "c": 2}
WEIGHTS = {"a": 1.0, "b": 3.0, "c": 0.5}
OFFSETS = {"a": 0, "b": 3, "c": 8}


def make_mixture(seed: int = 0, **weights: float) -> MixtureOrder:
    chosen = WEIGHTS | weights
    return MixtureOrder({name: (EpochOrder(SIZES[name], seed), chosen[name]) for name in SIZES}, seed)


def test_each_part_is_asked_epoch_after_epoch() -> None:
    order = make_mixture()
    asked: dict[str, list[int]] = {name: [] for name in SIZES}
    for group in range(400):
        part, place = order.locate(group)
        name = order.names[part]
        assert place == len(asked[name])
        asked[name].append(order.index(group) - OFFSETS[name])
    for name, size in SIZES.items():
        assert len(asked[name]) > 3 * size
        assert asked[name] == [EpochOrder(size, 0).index(place) for place in range(len(asked[name]))]
        for start in range(0, len(asked[name]) - size, size):
            assert sorted(asked[name][start : start + size]) == list(range(size))


def test_the_order_depends_on_the_seed_alone() -> None:
    forwards, backwards = make_mixture(), make_mixture()
    expected = [forwards.index(group) for group in range(200)]
    assert [backwards.index(group) for group in reversed(range(200))] == expected[::-1]
    assert [make_mixture(seed=1).index(group) for group in range(200)] != expected
    rng = random.Random("0/mixture")  # a text seed gives the same numbers in every process
    drawn = [rng.choices(list(WEIGHTS), weights=list(WEIGHTS.values()))[0] for _ in range(200)]
    assert [forwards.names[forwards.locate(group)[0]] for group in range(200)] == drawn


def test_a_resumed_mixture_must_be_the_same() -> None:
    state = json.loads(json.dumps(make_mixture().state_dict()))
    make_mixture().load_state_dict(state)
    with pytest.raises(ValueError, match=r"the checkpoint's mixture has the weights \[1.0, 4.0, 4.5\]"):
        make_mixture(b=2.0).load_state_dict(state)
    with pytest.raises(ValueError, match=r"mixture has the names None .* resume with the task.parts"):
        make_mixture().load_state_dict({})


def test_make_order() -> None:
    parts: dict[str, Any] = {
        "a": {"task": {"kind": "sorting"}},
        "b": {"weight": 3, "task": {"kind": "arithmetic", "curriculum": {}}},
    }
    task = MixtureTaskConfig.model_validate({"parts": parts})
    order = make_order(task, {"a": 4, "b": 6}, seed=0)
    assert isinstance(order, MixtureOrder)
    assert order.num_examples == 10
    assert type(make_order(task.parts["a"].task, {"": 4}, seed=0)) is EpochOrder
    assert isinstance(make_order(task.parts["b"].task, {"": 6}, seed=0), CurriculumOrder)
    assert set(order.metrics()) >= {"curriculum/seen_frac/b", "curriculum/settled_frac/b"}
    assert not any(name.endswith("/a") for name in order.metrics())


def test_a_part_of_a_mixture_can_have_a_curriculum() -> None:
    def order() -> MixtureOrder:
        curriculum = CurriculumOrder(6, 0, CurriculumConfig(min_weight=0.05))
        return MixtureOrder({"plain": (EpochOrder(4, 0), 1.0), "harder": (curriculum, 1.0)}, seed=0)

    whole = order()
    asked: Counter[int] = Counter()
    for group in range(600):
        index = whole.index(group)
        asked[index] += 1
        has_signal = index in (4, 5)
        whole.observe({group: has_signal})
        whole.forget([group])
        if group == 299:
            resumed = order()
            resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
        if group >= 300:
            assert resumed.index(group) == index
            resumed.observe({group: has_signal})
            resumed.forget([group])
    assert min(asked[4], asked[5]) > 5 * max(asked[index] for index in range(6, 10))
    assert max(asked[index] for index in range(4)) - min(asked[index] for index in range(4)) <= 1
    assert set(asked) == set(range(10))


def sized(order: MixtureOrder) -> int:
    """Return the number of items in all containers of the order."""
    return sum(len(value) for value in vars(order).values() if isinstance(value, list | dict | set))


def test_a_mixture_remembers_only_groups_that_are_not_done() -> None:
    """A run of 100,000 steps has millions of groups that are done."""
    order, whole = make_mixture(), make_mixture()
    for group in range(5000):
        assert order.index(group) == whole.index(group)
        if group >= 10:
            order.forget([group - 10])
    assert sized(order) < 50
    assert len(json.dumps(order.state_dict())) < 10_000


def test_a_resumed_mixture_continues_and_knows_the_groups_that_are_not_done() -> None:
    whole, order = make_mixture(), make_mixture()
    expected = [whole.index(group) for group in range(300)]
    for group in range(200):
        order.index(group)
        if group not in (7, 150, 199):
            order.forget([group])
    state = json.loads(json.dumps(order.state_dict()))
    resumed = make_mixture()
    for later in (resumed, order):  # in a new process, and in one that goes back after some more steps
        later.load_state_dict(state)
        assert [later.index(group) for group in (150, 7, 199)] == [expected[g] for g in (150, 7, 199)]
        assert [later.index(group) for group in range(200, 300)] == expected[200:]
        later.forget(range(200, 300))


def test_a_mixture_resumes_from_a_checkpoint_of_an_earlier_version() -> None:
    state = make_mixture().state_dict()
    earlier = {name: state[name] for name in ("names", "weights", "parts")}
    whole, order = make_mixture(), make_mixture()
    order.index(50)
    order.load_state_dict(earlier)
    assert [order.index(group) for group in (40, 100)] == [whole.index(group) for group in (40, 100)]


def test_no_examples_are_refused() -> None:
    with pytest.raises(ValueError, match="no training examples"):
        EpochOrder(0, seed=0)
