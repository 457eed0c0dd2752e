"""The prompt ledger: every prompt of an epoch is trained once, whatever is given back in between."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_ray.tasks.examples import Example
from grpo_ray.tasks.prompt_ledger import PromptLedger, make_items

TEMPLATE = "Q {question}:"


def tokenizer(text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
    assert not add_special_tokens
    return {"input_ids": list(text.encode())}


def make_ledger(num_examples: int = 5, seed: int = 0) -> PromptLedger:
    examples = [Example(str(i), f"truth {i}") for i in range(num_examples)]
    return PromptLedger(examples, TEMPLATE, tokenizer, seed)


def ids(items: Sequence[Any]) -> list[int]:
    return [item.group_id for item in items]


def test_order_is_a_permutation_an_epoch() -> None:
    items = make_ledger().take(15)
    assert ids(items) == list(range(15))
    epochs = [[item.prompt for item in items[start : start + 5]] for start in (0, 5, 10)]
    assert all(sorted(epoch) == [f"Q {i}:" for i in range(5)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert [item.prompt for item in make_ledger(seed=1).take(15)] != [item.prompt for item in items]
    assert items == [*make_ledger().take(4), *_after(make_ledger(), 4).take(11)]


def _after(ledger: PromptLedger, num_taken: int) -> PromptLedger:
    ledger.take(num_taken)
    return ledger


def test_order_is_the_same_in_every_process() -> None:
    assert [item.prompt for item in make_ledger().take(5)] == ["Q 0:", "Q 1:", "Q 4:", "Q 3:", "Q 2:"]


def test_item_holds_prompt_tokens_and_truth() -> None:
    item = make_ledger(num_examples=1).take(1)[0]
    assert (item.group_id, item.prompt, item.ground_truth) == (0, "Q 0:", "truth 0")
    assert item.prompt_token_ids == tuple(b"Q 0:")


def test_given_back_prompts_come_first() -> None:
    ledger = make_ledger()
    first = ledger.take(4)
    ledger.give_back([3, 1])
    assert (ledger.in_flight, ledger.waiting) == ({0, 2}, {1, 3})
    assert ledger.take(1) == [first[1]]
    assert ids(ledger.take(2)) == [3, 4]
    assert ledger.next_group_id == 5
    ledger.mark_trained([0, 1, 2])
    assert (ledger.num_trained, ledger.in_flight, ledger.waiting) == (3, {3, 4}, frozenset())


@pytest.mark.parametrize("group_ids", [[0], [7], [1, 1], [2]])
def test_only_groups_in_flight_can_leave(group_ids: list[int]) -> None:
    ledger = make_ledger()
    ledger.take(3)
    ledger.mark_trained([0])
    ledger.give_back([2])
    before = ledger.state_dict()
    for leave in (ledger.mark_trained, ledger.give_back):
        with pytest.raises(ValueError, match="not in flight"):
            leave([*group_ids, 1] if group_ids != [1, 1] else group_ids)
    assert ledger.state_dict() == before


def test_resume_takes_lost_prompts_again() -> None:
    ledger = make_ledger()
    ledger.take(8)
    ledger.mark_trained([0, 2, 7])
    ledger.give_back([4])
    state = json.loads(json.dumps(ledger.state_dict()))
    resumed = make_ledger()
    resumed.load_state_dict(state)
    assert (resumed.waiting, resumed.in_flight, resumed.num_trained) == ({1, 3, 4, 5, 6}, frozenset(), 3)
    assert ids(resumed.take(6)) == [1, 3, 4, 5, 6, 8]
    with pytest.raises(ValueError, match="has seed 0, this run has 1"):
        make_ledger(seed=1).load_state_dict(state)
    with pytest.raises(ValueError, match="has num_examples 5, this run has 6"):
        make_ledger(num_examples=6).load_state_dict(state)


def test_no_examples_is_refused() -> None:
    with pytest.raises(ValueError, match="no training examples"):
        make_ledger(num_examples=0)


def test_make_items_keeps_the_order() -> None:
    items = make_items([Example("b", "1"), Example("a", "2")], TEMPLATE, tokenizer)
    assert [(item.group_id, item.prompt, item.ground_truth) for item in items] == [
        (0, "Q b:", "1"),
        (1, "Q a:", "2"),
    ]


@settings(max_examples=150, deadline=None)
@given(data=st.data(), num_examples=st.integers(1, 7))
def test_no_prompt_is_skipped_or_trained_twice(data: st.DataObject, num_examples: int) -> None:
    ledger = make_ledger(num_examples)
    trained: list[tuple[int, str]] = []
    in_flight: dict[int, str] = {}
    for action in data.draw(
        st.lists(st.sampled_from(["take", "give_back", "mark_trained", "resume"]), max_size=40)
    ):
        some = sorted(data.draw(st.sets(st.sampled_from(sorted(in_flight))))) if in_flight else []
        if action == "take":
            items = ledger.take(data.draw(st.integers(0, 5)))
            assert not {item.group_id for item in items} & set(in_flight)
            in_flight |= {item.group_id: item.prompt for item in items}
        elif action == "give_back":
            ledger.give_back(some)
            in_flight = {g: prompt for g, prompt in in_flight.items() if g not in some}
        elif action == "mark_trained":
            ledger.mark_trained(some)
            trained += [(group_id, in_flight.pop(group_id)) for group_id in some]
        else:
            state = ledger.state_dict()
            ledger = make_ledger(num_examples)
            ledger.load_state_dict(state)
            in_flight = {}
        assert ledger.in_flight == set(in_flight)
        assert ledger.num_trained == len(trained)
    left = ledger.take(len(ledger.waiting))  # only the waiting ones
    everything = [*trained, *in_flight.items(), *((item.group_id, item.prompt) for item in left)]
    assert sorted(group_id for group_id, _ in everything) == list(range(ledger.next_group_id))
    for epoch in range(ledger.next_group_id // num_examples):
        prompts = [prompt for group_id, prompt in everything if group_id // num_examples == epoch]
        assert len(set(prompts)) == len(prompts) == num_examples
