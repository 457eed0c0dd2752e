"""The curriculum: how often it asks prompts with known pass rates, also after a resume."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from builders import make_completion, make_group, make_item
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_ray.config.task import CurriculumConfig
from grpo_ray.tasks.curriculum import CurriculumOrder
from grpo_ray.tasks.examples import Example
from grpo_ray.tasks.prompt_order import EpochOrder
from grpo_ray.tasks.prompt_stream import PromptStream
from grpo_ray.tasks.prompts import Prompter, TextTemplate
from grpo_ray.types import PromptItem

NUM_EXAMPLES = 30
RATES = {str(i): (0.0, 0.5, 1.0)[i % 3] for i in range(NUM_EXAMPLES)}  # by prompt


def tokenizer(text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
    return {"input_ids": list(text.encode())}


class Run:
    """The groups of a run that trains each step at once."""

    def __init__(self, min_weight: float = 0.1, seed: int = 0) -> None:
        examples = [Example(str(i), "") for i in range(NUM_EXAMPLES)]
        prompters = {"": Prompter(TextTemplate("{question}"), tokenizer)}  # type: ignore[arg-type]
        order = CurriculumOrder(NUM_EXAMPLES, seed, CurriculumConfig(min_weight=min_weight))
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
            self.prompts.observe({item.group_id: 0 < RATES[item.prompt] < 1})
            self.prompts.forget([item.group_id])


def step(run: Run, size: int = 5) -> list[str]:
    """Run one synchronous step: take prompts, and train all of their groups."""
    items = run.take(size)
    run.finish(items)
    return [item.prompt for item in items]


def test_prompts_with_signal_are_asked_more_and_every_prompt_occurs() -> None:
    run = Run()
    first = [prompt for _ in range(6) for prompt in step(run)]
    assert sorted(first) == sorted(RATES)  # nothing is known of a prompt before it was sampled
    later = Counter(prompt for _ in range(800) for prompt in step(run))
    assert set(later) == set(RATES)
    by_rate = {rate: sum(n for prompt, n in later.items() if RATES[prompt] == rate) for rate in (0.0, 0.5, 1.0)}
    # Of 10 prompts each, with weights 0.1, 1 and 0.1: shares 1/12, 10/12 and 1/12 of 4000, sd below 20.
    assert [by_rate[rate] for rate in (0.0, 0.5, 1.0)] == pytest.approx([333, 3333, 333], abs=60)
    middle = [later[prompt] for prompt in RATES if RATES[prompt] == 0.5]
    assert max(middle) - min(middle) <= 1  # each occurs in every epoch


def test_a_prompt_whose_signal_returns_is_in_every_epoch_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(min_weight=0.5)
    for _ in range(6):
        step(run)
    for prompt in RATES:
        monkeypatch.setitem(RATES, prompt, 0.5)
    for _ in range(200):
        step(run)
    counts = Counter(prompt for _ in range(60) for prompt in step(run))  # ten epochs, two of them partial
    assert len(counts) == NUM_EXAMPLES
    assert set(counts.values()) <= {9, 10, 11}


def test_without_outcomes_it_is_the_epoch_order() -> None:
    order, plain = CurriculumOrder(7, 3, CurriculumConfig()), EpochOrder(7, 3)
    assert [order.index(group) for group in range(50)] == [plain.index(group) for group in range(50)]
    assert order.metrics()["curriculum/settled_frac"] == 0.0


def test_metrics() -> None:
    order = CurriculumOrder(4, 0, CurriculumConfig(min_weight=0.2))
    indices = [order.index(group) for group in range(4)]
    order.observe({0: False, 1: False, 2: True})
    assert order.metrics() == {
        "curriculum/seen_frac": 0.75,
        "curriculum/settled_frac": 0.5,
        "curriculum/skipped": 0.0,
    }
    assert [order.weight(index) for index in indices] == [0.2, 0.2, 1.0, 1.0]
    asked = [order.index(group) for group in range(4, 44)]
    assert order.metrics()["curriculum/skipped"] > 0
    assert Counter(asked)[indices[2]] > Counter(asked)[indices[0]]


@pytest.mark.slow
@settings(max_examples=30)
@given(num_steps=st.integers(0, 30), num_lost=st.integers(0, 5))
def test_a_run_resumed_at_any_step_asks_the_same(num_steps: int, num_lost: int) -> None:
    """Groups that were in flight or buffered at the checkpoint get the same prompts after a resume."""
    run = Run()
    for _ in range(num_steps):
        step(run)
    in_flight = run.take(num_lost)
    resumed = Run()
    resumed.prompts.load_state_dict(json.loads(json.dumps(run.prompts.state_dict())))
    resumed.next_id = run.next_id
    run.waiting = [item.group_id for item in in_flight]
    resumed.waiting = [*run.waiting]
    assert resumed.take(num_lost) == run.take(num_lost) == in_flight
    for each in (run, resumed):
        each.finish(in_flight)
    assert [step(run) for _ in range(20)] == [step(resumed) for _ in range(20)]
    assert run.prompts.state_dict() == resumed.prompts.state_dict()


def test_late_outcomes_change_only_groups_not_yet_taken() -> None:
    run = Run()
    items = run.take(2 * NUM_EXAMPLES)  # far ahead, as with a large lag
    run.finish(items[:NUM_EXAMPLES])
    run.waiting = [item.group_id for item in items[NUM_EXAMPLES:]]
    assert run.take(NUM_EXAMPLES) == items[NUM_EXAMPLES:]
    assert Counter(RATES[item.prompt] for item in run.take(10))[0.5] > 5


def test_a_groups_outcome_is_its_signal_at_any_pass_rate_and_none_without_a_graded_response() -> None:
    """Signal does not require right answers: `sort_distance` may have none yet, and `brevity` never has."""
    for rewards, advantages, has_signal in (([0.4, 0.6], [-1, 1], True), ([0.6, 0.6], [0, 0], False)):
        assert make_group(make_item(), [make_completion([1])] * 2, rewards, advantages).outcome is has_signal
    group = make_group(make_item(4), [make_completion([1])] * 4, rewards=[1, 0, 0, 1])
    assert replace(group, errors={1: "too slow", 2: "too large"}).outcome is True
    assert replace(group, errors=dict.fromkeys(range(4), "too slow")).outcome is None


def test_only_unfinished_groups_are_remembered() -> None:
    run = Run()
    for _ in range(10):
        step(run)
    aside, dropped, in_flight = run.take(3)
    run.prompts.forget([aside.group_id, dropped.group_id])
    state: dict[str, Any] = run.prompts.state_dict()["order"]
    assert [group for group, _ in state["drawn"]] == [in_flight.group_id]
    assert len(state["seen"]) == NUM_EXAMPLES
    assert len(state["settled"]) == NUM_EXAMPLES * 2 // 3


def test_a_checkpoint_without_a_curriculum_is_refused() -> None:
    state = Run().prompts.state_dict() | {"order": {}}
    with pytest.raises(ValueError, match=r"written without task.curriculum; resume without it"):
        Run().prompts.load_state_dict(state)
