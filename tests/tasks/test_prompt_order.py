"""The orders of prompts: of a mixture, in proportion to its weights; and of a curriculum."""

import json
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from builders import make_completion, make_group, make_item
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_ray.config.task import CurriculumConfig, MixtureTaskConfig
from grpo_ray.tasks import make_order
from grpo_ray.tasks.examples import Example
from grpo_ray.tasks.prompt_order import CurriculumOrder, EpochOrder, MixtureOrder, PromptStream
from grpo_ray.tasks.prompts import Prompter, TextTemplate
from grpo_ray.types import PromptItem

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


def test_each_part_has_its_order_and_examples() -> None:
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
    with pytest.raises(ValueError, match="no training examples"):
        make_order(task, {"a": 4, "b": 0}, seed=0)


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


def test_a_mixture_remembers_only_groups_that_are_not_done() -> None:
    """A run of 100,000 steps has millions of groups that are done."""
    order, whole = make_mixture(), make_mixture()
    for group in range(5000):
        assert order.index(group) == whole.index(group)
        if group >= 10:
            order.forget([group - 10])
    assert sum(len(value) for value in vars(order).values() if isinstance(value, list | dict | set)) < 50
    assert len(json.dumps(order.state_dict())) < 10_000


def test_a_resumed_mixture_continues_and_knows_the_groups_that_are_not_done() -> None:
    whole, order = make_mixture(), make_mixture()
    expected = [whole.index(group) for group in range(300)]
    for group in range(200):
        order.index(group)
        if group not in (7, 150, 199):
            order.forget([group])
    state = json.loads(json.dumps(order.state_dict()))
    for later in (make_mixture(), order):  # in a new process, and in one that goes back after some more steps
        later.load_state_dict(state)
        assert [later.index(group) for group in (150, 7, 199)] == [expected[g] for g in (150, 7, 199)]
        assert [later.index(group) for group in range(200, 300)] == expected[200:]
        later.forget(range(200, 300))
    of_earlier_version = {name: state[name] for name in ("names", "weights", "parts")}
    order.load_state_dict(of_earlier_version)
    assert [order.index(group) for group in (40, 100)] == [expected[group] for group in (40, 100)]


NUM_EXAMPLES = 30
RATES = {str(i): (0.0, 0.5, 1.0)[i % 3] for i in range(NUM_EXAMPLES)}  # by prompt


class Run:
    """The groups of a run that trains each step at once."""

    def __init__(self) -> None:
        examples = [Example(str(i), "") for i in range(NUM_EXAMPLES)]
        order = CurriculumOrder(NUM_EXAMPLES, 0, CurriculumConfig(min_weight=0.1))
        prompters = {"": Prompter(TextTemplate("{question}"), None)}
        self.prompts, self.next_id = PromptStream(examples, prompters, order), 0
        self.waiting: list[int] = []

    def take(self, number: int) -> list[PromptItem]:
        """Take groups, those that wait first."""
        again, self.waiting = self.waiting[:number], self.waiting[number:]
        new = range(self.next_id, self.next_id + number - len(again))
        self.next_id += len(new)
        return [self.prompts.item(group_id) for group_id in (*again, *new)]

    def finish(self, items: Iterable[PromptItem]) -> None:
        for item in items:
            self.prompts.order.observe({item.group_id: 0 < RATES[item.prompt] < 1})
            self.prompts.order.forget([item.group_id])

    def step(self) -> list[str]:
        """Take prompts, and train all of their groups."""
        items = self.take(5)
        self.finish(items)
        return [item.prompt for item in items]


def test_prompts_with_signal_are_asked_more_and_every_prompt_occurs() -> None:
    run = Run()
    first = [prompt for _ in range(6) for prompt in run.step()]
    assert sorted(first) == sorted(RATES)  # nothing is known of a prompt before it was sampled
    later = Counter(prompt for _ in range(800) for prompt in run.step())
    assert set(later) == set(RATES)
    by_rate = [sum(n for prompt, n in later.items() if RATES[prompt] == rate) for rate in (0.0, 0.5, 1.0)]
    # Of 10 prompts each, with weights 0.1, 1 and 0.1: shares 1/12, 10/12 and 1/12 of 4000, sd below 20.
    assert by_rate == pytest.approx([333, 3333, 333], abs=60)
    middle = [later[prompt] for prompt in RATES if RATES[prompt] == 0.5]
    assert max(middle) - min(middle) <= 1  # each occurs in every epoch


def test_metrics_and_weights_follow_the_outcomes() -> None:
    order, plain = CurriculumOrder(4, 0, CurriculumConfig(min_weight=0.2)), EpochOrder(4, 0)
    indices = [order.index(group) for group in range(8)]
    assert indices == [plain.index(group) for group in range(8)]  # nothing is known yet
    order.observe({0: False, 1: False, 2: True})
    shown = {"curriculum/seen_frac": 0.75, "curriculum/settled_frac": 0.5, "curriculum/skipped": 0.0}
    assert order.metrics() == shown
    assert [order.weight(index) for index in indices[:4]] == [0.2, 0.2, 1.0, 1.0]
    asked = [order.index(group) for group in range(8, 44)]
    assert order.metrics()["curriculum/skipped"] > 0
    assert Counter(asked)[indices[2]] > Counter(asked)[indices[0]]
    order.observe({8 + asked.index(indices[0]): True})  # its signal returns
    assert order.weight(indices[0]) == 1.0
    assert order.metrics()["curriculum/settled_frac"] == 0.25


@pytest.mark.slow
@settings(max_examples=30)
@given(num_steps=st.integers(0, 30), num_lost=st.integers(0, 5))
def test_a_run_resumed_at_any_step_asks_the_same(num_steps: int, num_lost: int) -> None:
    """Groups that were in flight or buffered at the checkpoint get the same prompts after a resume."""
    run = Run()
    for _ in range(num_steps):
        run.step()
    in_flight = run.take(num_lost)
    resumed = Run()
    resumed.prompts.load_state_dict(json.loads(json.dumps(run.prompts.state_dict())))
    resumed.next_id = run.next_id
    run.waiting = [item.group_id for item in in_flight]
    resumed.waiting = [*run.waiting]
    assert resumed.take(num_lost) == run.take(num_lost) == in_flight
    for each in (run, resumed):
        each.finish(in_flight)
    assert [run.step() for _ in range(20)] == [resumed.step() for _ in range(20)]
    assert run.prompts.state_dict() == resumed.prompts.state_dict()


def test_a_groups_outcome_is_its_signal_at_any_pass_rate_and_none_without_a_graded_response() -> None:
    """Signal does not require right answers: `sort_distance` may have none yet, and `brevity` never has."""
    for rewards, advantages, has_signal in (([0.4, 0.6], [-1, 1], True), ([0.6, 0.6], [0, 0], False)):
        assert make_group(make_item(), [make_completion([1])] * 2, rewards, advantages).outcome is has_signal
    group = make_group(make_item(4), [make_completion([1])] * 4, rewards=[1, 0, 0, 1])
    assert replace(group, errors={1: "too slow", 2: "too large"}).outcome is True
    assert replace(group, errors=dict.fromkeys(range(4), "too slow")).outcome is None
    alone = replace(group, advantages=0 * group.advantages, errors=dict.fromkeys(range(3), "too slow"))
    assert alone.outcome is None  # one reward is compared with none
    assert replace(alone, errors=dict.fromkeys(range(2), "too slow")).outcome is False


def test_only_unfinished_groups_are_remembered() -> None:
    run = Run()
    for _ in range(10):
        run.step()
    aside, dropped, in_flight = run.take(3)
    run.prompts.order.forget([aside.group_id, dropped.group_id])
    state: dict[str, Any] = run.prompts.state_dict()["order"]
    assert [group for group, _ in state["drawn"]] == [in_flight.group_id]
    assert len(state["seen"]) == NUM_EXAMPLES
    assert len(state["settled"]) == NUM_EXAMPLES * 2 // 3


def test_a_checkpoint_without_a_curriculum_is_refused() -> None:
    state = Run().prompts.state_dict() | {"order": {}}
    with pytest.raises(ValueError, match=r"written without task.curriculum; resume without it"):
        Run().prompts.load_state_dict(state)
