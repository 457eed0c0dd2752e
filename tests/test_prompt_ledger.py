"""The prompt ledger: every prompt of an epoch is trained once, whichever groups are given back in between."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_ray.tasks.examples import Example
from grpo_ray.tasks.prompt_ledger import PromptLedger
from grpo_ray.tasks.prompt_order import EpochOrder
from grpo_ray.tasks.prompts import Prompter, TextTemplate, make_items


def tokenizer(text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
    assert not add_special_tokens
    return {"input_ids": list(text.encode())}


PROMPTERS = {"": Prompter(TextTemplate("Q {question}:"), tokenizer)}  # type: ignore[arg-type]


def make_ledger(num_examples: int = 5, seed: int = 0) -> PromptLedger:
    examples = [Example(str(i), f"truth {i}") for i in range(num_examples)]
    return PromptLedger(examples, PROMPTERS, EpochOrder(num_examples, seed))


def ids(items: Sequence[Any]) -> list[int]:
    return [item.group_id for item in items]


def test_order_is_a_permutation_per_epoch() -> None:
    items = make_ledger().take_new(15)
    assert ids(items) == list(range(15))
    epochs = [[item.prompt for item in items[start : start + 5]] for start in (0, 5, 10)]
    assert all(sorted(epoch) == [f"Q {i}:" for i in range(5)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert [item.prompt for item in make_ledger(seed=1).take_new(15)] != [item.prompt for item in items]
    assert items == [*make_ledger().take_new(4), *_after(make_ledger(), 4).take_new(11)]


def _after(ledger: PromptLedger, num_taken: int) -> PromptLedger:
    ledger.take_new(num_taken)
    return ledger


def test_order_is_the_same_in_every_process() -> None:
    assert [item.prompt for item in make_ledger().take_new(5)] == ["Q 0:", "Q 1:", "Q 4:", "Q 3:", "Q 2:"]


def test_item_holds_prompt_tokens_and_truth() -> None:
    item = make_ledger(num_examples=1).take_new(1)[0]
    assert (item.group_id, item.prompt, item.ground_truth) == (0, "Q 0:", "truth 0")
    assert item.prompt_token_ids == tuple(b"Q 0:")


def states(ledger: PromptLedger) -> tuple[set[int], set[int], set[int], set[int], int]:
    """Return the groups in flight, buffered, waiting and set aside, and the number of trained ones."""
    sets = (ledger.in_flight, ledger.buffered, ledger.waiting, ledger.set_aside)
    return *map(set, sets), ledger.num_trained  # type: ignore[return-value]


def busy_ledger() -> PromptLedger:
    """Return a ledger with 0 trained, 1 buffered, 2 and 3 waiting, 4 set aside, 5 and 6 in flight."""
    ledger = make_ledger()
    ledger.take_new(7)
    for group_id in (0, 1, 3):
        ledger.mark_buffered(group_id)
    ledger.mark_trained([0])
    ledger.give_back([3, 2])
    ledger.mark_set_aside(4)
    return ledger


def test_states_of_groups_by_hand() -> None:
    ledger = make_ledger()
    assert states(ledger) == (set(), set(), set(), set(), 0)
    ledger.take_new(5)
    assert states(ledger) == ({0, 1, 2, 3, 4}, set(), set(), set(), 0)
    ledger.mark_buffered(1)
    ledger.mark_buffered(3)
    assert states(ledger) == ({0, 2, 4}, {1, 3}, set(), set(), 0)
    ledger.mark_trained([3])
    assert states(ledger) == ({0, 2, 4}, {1}, set(), set(), 1)
    ledger.give_back([1, 2])  # refused by the buffer, and lost
    assert states(ledger) == ({0, 4}, set(), {1, 2}, set(), 1)
    ledger.mark_set_aside(4)
    assert states(ledger) == ({0}, set(), {1, 2}, {4}, 1)
    assert ids(ledger.take_waiting()) == [1, 2]
    assert states(ledger) == ({0, 1, 2}, set(), set(), {4}, 1)
    assert states(busy_ledger()) == ({5, 6}, {1}, {2, 3}, {4}, 1)


def test_given_back_prompts_are_taken_again_lowest_first_and_new_ones_continue() -> None:
    ledger = make_ledger()
    first = ledger.take_new(4)
    ledger.give_back([3, 1])
    assert ledger.take_waiting() == [first[1], first[3]]
    assert ledger.take_waiting() == []
    ledger.give_back([2])
    assert ids(ledger.take_new(2)) == [4, 5]  # whichever groups wait
    assert ledger.next_group_id == 6
    assert ledger.take_waiting() == [first[2]]


def test_unfinished_groups_are_taken_and_still_to_be_trained() -> None:
    assert make_ledger().unfinished == frozenset()
    ledger = busy_ledger()
    assert ledger.unfinished == {1, 2, 3, 5, 6}
    ledger.mark_dropped([1])
    assert ledger.unfinished == {2, 3, 5, 6}


def test_groups_that_left_without_training_are_counted() -> None:
    ledger = busy_ledger()
    assert (ledger.num_trained, ledger.num_left) == (1, 1)  # 0 is trained, 4 is set aside
    ledger.mark_buffered(5)
    ledger.mark_dropped([5, 1])
    assert states(ledger) == ({6}, set(), {2, 3}, {4}, 1)
    assert (ledger.num_trained, ledger.num_left) == (1, 3)
    resumed = make_ledger()
    resumed.load_state_dict(json.loads(json.dumps(ledger.state_dict())), [])
    assert (resumed.num_trained, resumed.num_left, resumed.unfinished) == (1, 3, {2, 3, 6})


def test_group_that_was_cut_off_keeps_its_prompt_and_counts_its_cuts() -> None:
    ledger = make_ledger()
    first = ledger.take_new(3)
    ledger.mark_buffered(1)
    ledger.cut([0, 1])  # one in flight, and one that arrived too late
    assert states(ledger) == ({2}, set(), {0, 1}, set(), 0)
    assert ledger.take_waiting() == [replace(first[0], num_cuts=1), replace(first[1], num_cuts=1)]
    ledger.cut([1])
    ledger.give_back([2])  # refused as too old, which does not count as a cut
    assert ledger.take_waiting() == [replace(first[1], num_cuts=2), first[2]]
    ledger.mark_buffered(1)
    ledger.mark_trained([1])
    assert ledger.state_dict().keys() == make_ledger().state_dict().keys()


@pytest.mark.parametrize("finish", ["mark_trained", "mark_dropped", "mark_set_aside"])
def test_a_finished_group_leaves_no_cuts_behind(finish: str) -> None:
    ledger = make_ledger()
    ledger.take_new(2)
    ledger.cut([0, 1])
    ledger.take_waiting()
    if finish == "mark_set_aside":
        ledger.mark_set_aside(0)
    else:
        ledger.mark_buffered(0)
        getattr(ledger, finish)([0])
    assert ledger._num_cuts == {1: 1}


WRONG_STATES = {
    "mark_buffered": {0: "trained", 1: "buffered", 2: "waiting", 4: "set aside", 7: "new"},
    "mark_set_aside": {0: "trained", 1: "buffered", 2: "waiting", 4: "set aside", 7: "new"},
    "mark_trained": {0: "trained", 2: "waiting", 4: "set aside", 5: "in flight", 7: "new"},
    "mark_dropped": {0: "trained", 2: "waiting", 4: "set aside", 5: "in flight", 7: "new"},
    "give_back": {0: "trained", 2: "waiting", 4: "set aside", 7: "new"},
    "cut": {0: "trained", 2: "waiting", 4: "set aside", 7: "new"},
}
MANY = ("mark_trained", "mark_dropped", "give_back", "cut")  # methods that take several groups


@pytest.mark.parametrize(
    ("leave", "group_id"), [(leave, group_id) for leave, groups in WRONG_STATES.items() for group_id in groups]
)
def test_no_group_leaves_a_state_that_it_is_not_in(leave: str, group_id: int) -> None:
    """A group in another state (STRANGERS) is refused, with all groups of the call, and nothing changes."""
    ledger = busy_ledger()
    before = ledger.state_dict()
    with pytest.raises(ValueError, match=rf"groups \[{group_id}\] are not (in flight|buffered)"):
        getattr(ledger, leave)([1, group_id] if leave in MANY else group_id)
    assert ledger.state_dict() == before


@pytest.mark.parametrize("leave", MANY)
def test_group_listed_twice_is_refused(leave: str) -> None:
    ledger = busy_ledger()
    before = ledger.state_dict()
    with pytest.raises(ValueError, match=r"groups \[1\] .*listed twice"):
        getattr(ledger, leave)([1, 1])
    assert ledger.state_dict() == before


@pytest.mark.parametrize(
    ("held", "buffered"),
    [
        ([1], {1}),
        ([], set()),  # the buffer was lost
        ([1, 6, 3], {1, 3, 6}),  # the buffer was captured a moment later than the ledger
        ([0, 1, 4, 7], {1}),  # trained, set aside, and one that this ledger never gave out
    ],
)
def test_resume_takes_groups_again_that_the_buffer_does_not_hold(held: list[int], buffered: set[int]) -> None:
    state = json.loads(json.dumps(busy_ledger().state_dict()))
    resumed = make_ledger()
    resumed.load_state_dict(state, held)
    waiting = {1, 2, 3, 5, 6} - buffered
    assert states(resumed) == (set(), buffered, waiting, {4}, 1)
    assert resumed.next_group_id == 7
    assert resumed.take_waiting() == [item for item in make_ledger().take_new(7) if item.group_id in waiting]
    assert ids(resumed.take_new(2)) == [7, 8]


def test_state_of_another_run_is_refused() -> None:
    state = busy_ledger().state_dict()
    with pytest.raises(ValueError, match="has seed 0, this run has 1"):
        make_ledger(seed=1).load_state_dict(state, [])
    with pytest.raises(ValueError, match="has num_examples 5, this run has 6"):
        make_ledger(num_examples=6).load_state_dict(state, [])
    examples = [Example(str(i), f"truth {i}") for i in (0, 1, 2, 4, 3)]  # the file in another order
    with pytest.raises(ValueError, match="has examples_sha256 "):
        PromptLedger(examples, PROMPTERS, EpochOrder(5, seed=0)).load_state_dict(state, [])


def test_no_examples_is_refused() -> None:
    with pytest.raises(ValueError, match="no training examples"):
        make_ledger(num_examples=0)


def test_make_items_keeps_the_order() -> None:
    items = make_items([Example("b", "1"), Example("a", "2")], PROMPTERS)
    assert [(item.group_id, item.prompt, item.ground_truth) for item in items] == [
        (0, "Q b:", "1"),
        (1, "Q a:", "2"),
    ]


ACTIONS = [
    "take_new", "take_waiting", "give_back", "cut", "mark_buffered", "mark_trained", "mark_dropped",
    "mark_set_aside", "resume",
]  # fmt: skip


class Run:
    """A model of a run, which knows the state and the prompt of every group without its ledger."""

    def __init__(self, num_examples: int) -> None:
        self.num_examples = num_examples
        self.ledger = make_ledger(num_examples)
        self.in_flight: dict[int, str] = {}
        self.buffered: dict[int, str] = {}
        self.set_aside: dict[int, str] = {}
        self.dropped: dict[int, str] = {}
        self.trained: list[tuple[int, str]] = []

    def take(self, items: Sequence[Any]) -> None:
        taken = {item.group_id: item.prompt for item in items}
        assert len(taken) == len(items)
        assert not taken.keys() & {*self.in_flight, *self.buffered, *self.set_aside, *self.dropped}
        assert not taken.keys() & dict(self.trained).keys()
        self.in_flight |= taken

    def act(self, action: str, data: st.DataObject) -> None:
        def some(groups: dict[int, str]) -> list[int]:
            return sorted(data.draw(st.sets(st.sampled_from(sorted(groups))))) if groups else []

        if action == "take_new":
            self.take(self.ledger.take_new(data.draw(st.integers(0, 5))))
        elif action == "take_waiting":
            self.take(self.ledger.take_waiting())
        elif action in ("give_back", "cut"):
            lost = some(self.in_flight | self.buffered)
            getattr(self.ledger, action)(lost)
            for group_id in lost:
                (self.in_flight if group_id in self.in_flight else self.buffered).pop(group_id)
        elif action == "mark_trained":
            batch = some(self.buffered)
            self.ledger.mark_trained(batch)
            self.trained += [(group_id, self.buffered.pop(group_id)) for group_id in batch]
        elif action == "mark_dropped":
            groups = some(self.buffered)
            self.ledger.mark_dropped(groups)
            self.dropped |= {group_id: self.buffered.pop(group_id) for group_id in groups}
        elif action == "resume":
            kept = some(self.in_flight | self.buffered)
            state = json.loads(json.dumps(self.ledger.state_dict()))
            self.ledger = make_ledger(self.num_examples)
            self.ledger.load_state_dict(state, kept)
            self.buffered = {g: p for g, p in (self.in_flight | self.buffered).items() if g in kept}
            self.in_flight = {}
        else:
            goal = self.buffered if action == "mark_buffered" else self.set_aside
            for group_id in some(self.in_flight):
                getattr(self.ledger, action)(group_id)
                goal[group_id] = self.in_flight.pop(group_id)

    def check(self) -> None:
        parts = states(self.ledger)
        assert (parts[0], parts[1]) == (self.in_flight.keys(), self.buffered.keys())
        assert (parts[3], parts[4]) == (self.set_aside.keys(), len(self.trained))
        assert self.ledger.num_left == len(self.set_aside) + len(self.dropped)
        known = [*parts[0], *parts[1], *parts[2], *parts[3], *dict(self.trained), *self.dropped]
        assert sorted(known) == list(range(self.ledger.next_group_id))  # each group is in one state


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(data=st.data(), num_examples=st.integers(1, 7))
def test_no_prompt_is_skipped_or_trained_twice(data: st.DataObject, num_examples: int) -> None:
    run = Run(num_examples)
    for action in data.draw(st.lists(st.sampled_from(ACTIONS), max_size=40)):
        run.act(action, data)
        run.check()
    run.take(run.ledger.take_waiting())
    for group_id in list(run.in_flight):
        run.ledger.mark_buffered(group_id)
    run.ledger.mark_trained(run.in_flight | run.buffered)
    left = [*run.set_aside.items(), *run.dropped.items()]
    everything = [*run.trained, *run.in_flight.items(), *run.buffered.items(), *left]
    assert run.ledger.num_trained == len(everything) - len(left)
    assert sorted(group_id for group_id, _ in everything) == list(range(run.ledger.next_group_id))
    for epoch in range(run.ledger.next_group_id // num_examples):
        prompts = [prompt for group_id, prompt in everything if group_id // num_examples == epoch]
        assert len(set(prompts)) == len(prompts) == num_examples
