"""The GroupBook without an event loop: its moves by hand, and random schedules with restores in between."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from builders import schedule_config
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_ray.core.groups import GroupBook, State
from grpo_ray.core.staleness import oldest_allowed, version_trained_at
from grpo_ray.tasks.examples import Example
from grpo_ray.tasks.prompt_order import EpochOrder, PromptStream
from grpo_ray.tasks.prompts import Prompter, TextTemplate, make_items
from grpo_ray.types import NO_VERSION, GroupFacts

SIZE = 2  # groups per step


def tokenizer(texts: list[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
    assert not add_special_tokens
    return {"input_ids": [list(text.encode()) for text in texts]}


PROMPTERS = {"": Prompter(TextTemplate("Q {question}:"), tokenizer)}  # type: ignore[arg-type]


def make_prompts(num_examples: int = 5, seed: int = 0) -> PromptStream:
    examples = [Example(str(i), f"truth {i}") for i in range(num_examples)]
    return PromptStream(examples, PROMPTERS, EpochOrder(num_examples, seed))


def make_book(
    *, max_lag: int = 1, lookahead: int = 1, oversampled: float = 0.0, dropped_batches: int = 0,
    max_bytes: int = 10**9, version: int = 0, task: dict[str, Any] | None = None, over_age: str = "wait",
) -> GroupBook:  # fmt: skip
    algorithm = {
        "num_steps": 1000, "prompts_per_step": SIZE, "oversample_frac": oversampled,
        "dynamic_sampling_tries": dropped_batches,
    }  # fmt: skip
    config = schedule_config(
        task=task or {"kind": "sorting"},
        algorithm=algorithm,
        episodes={"over_age": over_age},
        buffer={"lookahead": lookahead, "max_gib": max(max_bytes, 1) / 2**30},
        weight_sync={"max_lag": max_lag},
    )
    return GroupBook(config, make_prompts(), version)


def facts(oldest_version: int = 0, has_signal: bool = True, num_bytes: int = 10) -> GroupFacts:
    return GroupFacts(oldest_version, has_signal, num_bytes, has_signal)


def admit(book: GroupBook, max_groups: int = 100) -> list[int]:
    """Admit groups, and give them to Generators at once."""
    ids = [item.group_id for item in book.admit(max_groups)]
    for group_id in ids:
        book.sampling(group_id)
    return ids


def buffer(book: GroupBook, *group_ids: int, **changes: Any) -> None:
    """Move groups in flight into the buffer."""
    for group_id in group_ids:
        book.scored(group_id, facts(**changes))
        assert book.enter(group_id)
        book.buffered(group_id)


def states(book: GroupBook) -> dict[State, tuple[int, ...]]:
    return {state: ids for state in State if (ids := book.ids_in(state))}


# ---- the stream of prompts ----


def test_order_is_a_permutation_per_epoch() -> None:
    items = [make_prompts().item(group_id) for group_id in range(15)]
    epochs = [[item.prompt for item in items[start : start + 5]] for start in (0, 5, 10)]
    assert all(sorted(epoch) == [f"Q {i}:" for i in range(5)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert [make_prompts(seed=1).item(group_id).prompt for group_id in range(5)] != epochs[0]
    assert epochs[0] == ["Q 0:", "Q 1:", "Q 4:", "Q 3:", "Q 2:"]  # the same in every process


def test_items_hold_prompt_tokens_truth_and_cuts_in_order() -> None:
    item = make_prompts(num_examples=1).item(0, num_cuts=2)
    assert (item.group_id, item.prompt, item.ground_truth, item.num_cuts) == (0, "Q 0:", "truth 0", 2)
    assert item.prompt_token_ids == tuple(b"Q 0:")
    items = make_items([Example("b", "1"), Example("a", "2")], PROMPTERS)
    assert [(item.group_id, item.prompt) for item in items] == [(0, "Q b:"), (1, "Q a:")]


def test_state_of_another_run_is_refused() -> None:
    state = make_prompts().state_dict()
    make_prompts().load_state_dict(json.loads(json.dumps(state)))
    make_prompts(seed=1).load_state_dict(None)  # the beginning of any run
    with pytest.raises(ValueError, match="has seed 0, this run has 1"):
        make_prompts(seed=1).load_state_dict(state)
    with pytest.raises(ValueError, match="has num_examples 5, this run has 6"):
        make_prompts(num_examples=6).load_state_dict(state)
    examples = [Example(str(i), f"truth {i}") for i in (0, 1, 2, 4, 3)]  # the file in another order
    with pytest.raises(ValueError, match="has examples_sha256 "):
        PromptStream(examples, PROMPTERS, EpochOrder(5, seed=0)).load_state_dict(state)


# ---- moves by hand ----


def test_a_group_goes_from_admission_to_a_trained_step() -> None:
    book = make_book()
    assert book.num_admissible == 4  # (version 0 + 1 + a lag of 1) * 2 groups
    assert admit(book, max_groups=3) == [0, 1, 2]
    assert admit(book) == [3]
    assert (admit(book), book.num_admissible, book.next_id) == ([], 0, 4)
    book.scored(1, facts())
    assert states(book) == {State.IN_FLIGHT: (0, 2, 3), State.SCORED: (1,)}
    assert book.enter(1)
    assert states(book) == {State.IN_FLIGHT: (0, 2, 3), State.ENTERING: (1,)}
    book.buffered(1)
    assert book.batch(1) is None  # 0 is missing
    buffer(book, 0)
    batch = book.batch(1)
    assert (batch.step, batch.group_ids, batch.dropped_ids, batch.oldest_version) == (1, (0, 1), (), -1)
    assert (batch.num_buffered, batch.num_bytes) == (0, 0)
    assert states(book) == {State.IN_FLIGHT: (2, 3), State.IN_BATCH: (0, 1)}
    book.trained(1)
    assert (states(book), book.num_trained) == ({State.IN_FLIGHT: (2, 3)}, 2)
    assert book.unfinished == {2, 3}
    assert book.num_admissible == 0  # the version is not published yet
    book.publish(1)
    assert admit(book) == [4, 5]


def test_a_group_that_was_set_aside_or_dropped_gives_its_slot_to_another() -> None:
    book = make_book(max_lag=0, dropped_batches=1)
    assert admit(book) == [0, 1]
    book.set_aside(0)
    assert (book.given_up, book.num_set_aside, admit(book)) == ({0}, 1, [2])
    buffer(book, 1, has_signal=False)
    assert states(book) == {State.IN_FLIGHT: (2,), State.DROPPED: (1,)}
    assert admit(book) == [3]
    buffer(book, 2, 3)
    batch = book.batch(1)
    assert (batch.group_ids, batch.dropped_ids, book.num_set_aside) == ((2, 3), (1,), 0)
    book.trained(1)
    assert (book.num_trained, book.num_dropped, book.unfinished) == (2, 1, frozenset())
    assert book.metrics() == {"rollout/set_aside_groups": 1.0}


def test_groups_without_signal_are_dropped_as_soon_as_a_batch_may_drop_them() -> None:
    """1 is at once; 2 and 3 may have to fill the batch, until 0, before them, is set aside."""
    book = make_book(dropped_batches=1)
    makes_room = []
    for group_id in admit(book)[1:]:
        book.scored(group_id, facts(has_signal=False))
        assert book.enter(group_id)
        makes_room.append(book.buffered(group_id))
    assert (makes_room, book.ids_in(State.DROPPED)) == ([True, False, False], (1,))
    book.set_aside(0)
    assert (book.ids_in(State.DROPPED), book.ids_in(State.BUFFERED), admit(book)) == ((1, 2), (3,), [4, 5, 6])
    buffer(book, 4)
    buffer(book, 6, has_signal=False)
    assert book.ids_in(State.BUFFERED) == (3, 4, 6)
    assert book.batch(1).group_ids == (3, 4)  # no more may be dropped
    assert states(book) == {State.IN_FLIGHT: (5,), State.IN_BATCH: (1, 2, 3, 4), State.DROPPED: (6,)}


def test_a_group_with_too_old_a_token_is_refused_and_sampled_again() -> None:
    """The second guard; admission alone never lets it happen."""
    book = make_book(max_lag=0, version=3)
    state = make_book().state_dict()  # every group that was taken has been trained
    book.load_state_dict({**state, "next_group_id": 3 * SIZE, "num_trained": 3 * SIZE}, {})
    assert admit(book) == [6, 7]
    buffer(book, 6, oldest_version=2)
    buffer(book, 7, oldest_version=3)
    assert book.batch(4) is None
    assert (book.ids_in(State.WAITING), bool(book.discarded), book.take_discarded()) == ((6,), True, [6])
    assert (admit(book), book.take_discarded()) == ([6], [])
    buffer(book, 6, oldest_version=3)
    batch = book.batch(4)
    assert (batch.group_ids, batch.num_refused) == ((6, 7), 1)


def test_room_is_kept_for_the_next_batch() -> None:
    """A group that the next batch waits for always enters, the others up to `max_bytes`."""
    book = make_book(max_lag=3, max_bytes=25)
    admit(book)
    for group_id in range(7, 1, -1):
        book.scored(group_id, facts(num_bytes=10))
    assert [book.enter(group_id) for group_id in (7, 6, 5)] == [True, True, False]
    book.buffered(7)
    buffer(book, 0, 1, num_bytes=10)
    assert not book.enter(4)
    book.lost([6])  # it did not arrive
    assert not book.enter(4)
    assert book.batch(1) is not None
    assert [book.enter(group_id) for group_id in (5, 4, 3, 2)] == [True, False, True, True]


def test_late_groups_are_cut_off_and_count_their_cuts() -> None:
    """With a lag of 0 and two groups too many, the batch of step 2 may not use what version 0 sampled."""
    book = make_book(max_lag=0, oversampled=1.5)
    assert [item.group_id for item in book.admit(9)] == [0, 1, 2, 3, 4]
    for group_id in (0, 1, 2, 3):
        book.sampling(group_id)  # 4 waits for a Generator
    buffer(book, 3, 1, 0)
    book.scored(2, facts())
    batch = book.batch(1)
    assert (batch.group_ids, batch.late_ids, batch.num_cut) == ((1, 3), (4,), 1)
    assert book.take_discarded() == [0]
    assert states(book) == {State.SCORED: (2,), State.IN_BATCH: (1, 3), State.WAITING: (0, 4)}
    assert book.num_admissible == 0  # at version 0 it would be cut off again
    assert book.enter(2)
    book.buffered(2)  # it was on its way, and comes too late
    assert book.take_discarded() == [2]
    book.trained(1)
    book.publish(1)
    assert [(item.group_id, item.num_cuts) for item in book.admit(3)] == [(0, 1), (2, 1), (4, 0)]
    book.sampling(0)
    book.sampling(4)
    assert [item.group_id for item in book.admit(9)] == [5, 6]
    buffer(book, 4, 2, oldest_version=1)
    late = book.batch(2)
    assert (late.late_ids, late.num_cut) == ((0, 5, 6), 2)  # of which 2 and 0 were sampled
    resumed = make_book(max_lag=0, oversampled=1.5, version=2)
    resumed.load_state_dict(json.loads(json.dumps(book.state_dict())), {})
    cuts = [(item.group_id, item.num_cuts) for item in resumed.admit(9)]
    assert cuts[:1] == [(0, 2)]
    assert dict(cuts)[2] == 1
    book.trained(2)
    book.publish(2)
    assert [(item.group_id, item.num_cuts) for item in book.admit(1)] == [(0, 2)]


def test_old_groups_of_masked_tasks_are_kept() -> None:
    episodes = {"kind": "episodes", "episode": "games:play", "examples": "games:examples"}
    book = make_book(max_lag=0, oversampled=1.0, task=episodes, over_age="mask")
    admit(book)
    buffer(book, 0, 1, 2)
    batch = book.batch(1)
    assert (batch.late_ids, batch.num_cut, book.ids_in(State.BUFFERED)) == ((), 0, (2,))


# ---- states that a move may not start from ----


def busy_book() -> GroupBook:
    """Return a book: 0 set aside, 1 and 2 in a batch, 3 buffered, 4 waiting, 5 scored, 6 and 7 in flight."""
    book = make_book(max_lag=3)
    admit(book)
    book.set_aside(0)
    buffer(book, 1, 2, 3, 4)
    assert book.batch(1) is not None
    book._discard([4])
    book.scored(5, facts())
    return book


MOVES: dict[str, tuple[Callable[[GroupBook, int], object], set[int]]] = {
    "sampling": (lambda book, group_id: book.sampling(group_id), {4, 6, 7, 8}),
    "scored": (lambda book, group_id: book.scored(group_id, facts()), {4, 6, 7, 8}),
    "enter": (lambda book, group_id: book.enter(group_id), {5}),
    "buffered": (lambda book, group_id: book.buffered(group_id), set()),
    "lost": (lambda book, group_id: book.lost([group_id]), set()),
    "set_aside": (lambda book, group_id: book.set_aside(group_id), {4, 6, 7, 8}),
}


@pytest.mark.parametrize("move", MOVES)
def test_no_group_leaves_a_state_that_it_is_not_in(move: str) -> None:
    """A group in another state is refused, and nothing changes."""
    act, allowed = MOVES[move]
    book = busy_book()
    admit(book)  # 4 again, and 8
    for group_id in range(10):
        before = book.state_dict()
        if group_id in allowed:
            continue
        with pytest.raises(ValueError, match=rf"groups \[{group_id}\] are not"):
            act(book, group_id)
        assert book.state_dict() == before
    assert book.enter(5)
    with pytest.raises(ValueError, match=r"groups \[5\] are not .*listed twice"):
        book.lost([5, 5])


def test_only_the_chosen_batch_is_trained_and_once() -> None:
    book = busy_book()
    with pytest.raises(AssertionError, match="step 1 is in training"):
        book.trained(2)
    book = busy_book()
    book.trained(1)
    with pytest.raises(AssertionError, match="no batch"):
        book.trained(1)


def test_restored_book_by_hand() -> None:
    state = json.loads(json.dumps(busy_book().state_dict()))
    assert {name: state[name] for name in ("in_flight", "buffered", "waiting", "set_aside")} == {
        "in_flight": [5, 6, 7], "buffered": [1, 2, 3], "waiting": [4], "set_aside": [0],
    }  # fmt: skip
    book = make_book(max_lag=3)
    book.load_state_dict(state, {3: facts(), 5: facts(), 0: facts(), 99: facts()})
    # The batch was not trained: the buffer no longer has its groups. It had 5 a moment later.
    assert states(book) == {State.BUFFERED: (3, 5), State.WAITING: (1, 2, 4, 6, 7)}
    assert admit(book) == [1, 2, 4, 6, 7, 8]
    assert (book.given_up, book.next_id) == ({0}, 9)


def test_dropped_groups_are_dropped_again_after_a_restore() -> None:
    """They leave with the next batch, so a checkpoint before it still holds them."""
    book = make_book(max_lag=0, dropped_batches=1)
    admit(book)
    buffer(book, 0, has_signal=False)
    assert admit(book) == [2]
    state = book.state_dict()
    restored = make_book(max_lag=0, dropped_batches=1)
    restored.load_state_dict(state, {0: facts(has_signal=False)})
    assert states(restored) == {State.DROPPED: (0,), State.WAITING: (1, 2)}
    assert admit(restored) == [1, 2]
    for each in (book, restored):
        buffer(each, 1, 2)
        batch = each.batch(1)
        assert (batch.group_ids, batch.dropped_ids) == ((1, 2), (0,))


# ---- random schedules ----


class Run:
    """A run of random moves, and what it should come to, kept without the book."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.book = make_book(**options)
        self.version = 0  # the Learner's
        self.trained: list[int] = []
        self.dropped: list[int] = []
        self.sampled: dict[int, int] = {}  # by group in flight: the version that samples it
        self.held: dict[int, GroupFacts] = {}  # in the buffer
        self.checkpoint: dict[str, Any] | None = None

    def act(self, action: str, data: st.DataObject) -> None:
        getattr(self, f"_{action}")(data)
        self.book.take_discarded()
        self.check()

    def _some(self, data: st.DataObject, state: State) -> int | None:
        ids = self.book.ids_in(state)
        return data.draw(st.sampled_from(ids)) if ids else None

    def _admit(self, data: st.DataObject) -> None:
        items = self.book.admit(data.draw(st.integers(0, 4)))
        assert not {item.group_id for item in items} & {*self.trained, *self.dropped}

    def _sample(self, data: st.DataObject) -> None:
        if (group_id := self._some(data, State.IN_FLIGHT)) is not None:
            self.book.sampling(group_id)
            self.sampled[group_id] = self.book.published_version

    def _score(self, data: st.DataObject) -> None:
        if (group_id := self._some(data, State.IN_FLIGHT)) is not None and group_id in self.sampled:
            oldest = NO_VERSION if data.draw(st.integers(0, 9)) == 0 else self.sampled.pop(group_id)
            self.book.scored(group_id, facts(oldest, data.draw(st.booleans())))

    def _enter(self, data: st.DataObject) -> None:
        if (group_id := self._some(data, State.SCORED)) is not None:
            self.book.enter(group_id)

    def _buffer(self, data: st.DataObject) -> None:
        if (group_id := self._some(data, State.ENTERING)) is not None:
            self.held[group_id] = self.book._groups[group_id].facts
            self.book.buffered(group_id)

    def _lose(self, data: st.DataObject) -> None:
        if (group_id := self._some(data, State.ENTERING)) is not None:
            self.book.lost([group_id])

    def _set_aside(self, data: st.DataObject) -> None:
        if (group_id := self._some(data, State.IN_FLIGHT)) is not None:
            self.book.set_aside(group_id)

    def _step(self, data: st.DataObject) -> None:
        step = self.version + 1
        if (batch := self.book.batch(step)) is None:
            return
        assert batch.num_refused == 0  # admission suffices
        assert len(batch.group_ids) == SIZE
        oldest = oldest_allowed(version_trained_at(step), self.book._max_lag)
        assert all(self.held[group_id].oldest_version >= oldest for group_id in batch.group_ids)
        if data.draw(st.booleans()):  # else the batch is lost with the Learner
            self.book.trained(step)
            self.trained += batch.group_ids
            self.dropped += batch.dropped_ids
            self.version = step
        else:
            self._restore(data)

    def _publish(self, data: st.DataObject) -> None:
        if self.book.published_version < self.version:
            self.book.publish(self.version)

    def _save(self, data: st.DataObject) -> None:
        state = json.loads(json.dumps(self.book.state_dict()))
        in_buffer = {g: self.held[g] for s in (State.BUFFERED, State.DROPPED) for g in self.book.ids_in(s)}
        self.checkpoint = {
            "version": self.version, "state": state, "held": in_buffer, "trained": [*self.trained],
            "dropped": [*self.dropped],
        }  # fmt: skip

    def _restore(self, data: st.DataObject) -> None:
        saved = self.checkpoint
        self.version = saved["version"] if saved else 0
        self.book = make_book(version=self.version, **self.options)
        self.trained, self.dropped = ([*saved["trained"]], [*saved["dropped"]]) if saved else ([], [])
        self.sampled, self.held = {}, {**saved["held"]} if saved else {}
        if saved:
            self.book.load_state_dict(saved["state"], saved["held"])

    def finish_a_step(self) -> None:
        """Whatever happened, the next batch comes once all that is admitted arrives."""
        book, step = self.book, self.version + 1
        book.publish(self.version)
        for _ in range(3):
            book.take_discarded()
            for group_id in {*admit(book), *book.ids_in(State.IN_FLIGHT)}:
                book.scored(group_id, facts(self.sampled.get(group_id, self.version)))
            for _ in range(2):
                for group_id in book.ids_in(State.SCORED):
                    book.enter(group_id)
                for group_id in book.ids_in(State.ENTERING):
                    book.buffered(group_id)
            if (batch := book.batch(step)) is not None:
                assert batch.num_refused == 0
                return
        raise AssertionError(f"stuck: {states(book)}")

    def check(self) -> None:
        book = self.book
        assert len({*self.trained, *self.dropped}) == len(self.trained) + len(self.dropped)
        assert (book.num_trained, book.num_dropped) == (len(self.trained), len(self.dropped))
        known = [*book.unfinished, *self.trained, *self.dropped, *book.given_up]
        assert sorted(known) == list(range(book.next_id))  # each group is in one place: none lost, none twice
        assert sum(len(book.ids_in(state)) for state in State) == len(book.unfinished)
        places = (State.ENTERING, State.BUFFERED)
        assert book._num_bytes == sum(book._groups[g].facts.num_bytes for s in places for g in book.ids_in(s))


ACTIONS = [
    "admit", "admit", "sample", "sample", "sample", "score", "score", "score", "enter", "enter", "enter",
    "buffer", "buffer", "buffer", "step", "step", "publish", "publish", "lose", "set_aside", "save", "restore",
]  # fmt: skip


@pytest.mark.slow
@settings(max_examples=100)
@given(
    data=st.data(), max_lag=st.integers(0, 2), lookahead=st.integers(1, 4), is_oversampled=st.booleans(),
    dropped_batches=st.integers(0, 2),
)  # fmt: skip
def test_no_group_is_lost_or_trained_twice_or_too_old_under_any_schedule(
    data: st.DataObject, max_lag: int, lookahead: int, is_oversampled: bool, dropped_batches: int
) -> None:
    lookahead = 1 if is_oversampled else min(lookahead, max_lag * SIZE + 1)
    run = Run(
        {
            "max_lag": max_lag, "lookahead": lookahead, "oversampled": 1.0 * is_oversampled,
            "dropped_batches": dropped_batches, "max_bytes": data.draw(st.sampled_from([0, 25, 10**9])),
        }
    )  # fmt: skip
    for action in data.draw(st.lists(st.sampled_from(ACTIONS), max_size=80)):
        run.act(action, data)
    run.finish_a_step()
