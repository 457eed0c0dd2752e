"""The line of groups: windows, look-ahead, who comes first, and who leaves it for lack of signal."""

import itertools
import math
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_ray.actors.batch_queue import BatchQueue

# ---- the window ----


def test_strict_batches_by_hand() -> None:
    line = BatchQueue(2)
    assert line.window() == [0, 1]
    assert line.batch([]) is None
    assert line.batch([1, 2, 3]) is None  # 0 is waited for
    assert line.batch([3, 1, 2, 0]) == (0, 1)
    line.train((0, 1))
    assert line.window() == [2, 3]
    assert line.batch([3, 2]) == (2, 3)


def test_look_ahead_by_hand() -> None:
    line = BatchQueue(2, lookahead=3)
    assert line.window() == [0, 1, 2, 3]
    assert line.batch([4, 3]) is None  # 4 is beyond it
    assert line.batch([3, 1, 4]) == (1, 3)  # in the line's order
    assert line.batch([3, 2, 1, 0]) == (0, 1)  # the first, not those that came first
    line.train((1, 3))
    assert line.window()[0] == 0
    assert line.batch([0, 2]) == (0, 2)


def test_group_that_was_overtaken_as_often_as_allowed_is_waited_for() -> None:
    line = BatchQueue(2, lookahead=2)  # at most one batch late
    assert line.batch([1, 2]) == (1, 2)
    line.train((1, 2))
    assert line.batch([3, 4, 5, 6]) is None  # 0 has to be in this one
    assert line.batch([3, 4, 5, 0]) == (0, 3)
    line.train((0, 3))
    assert line.batch([4, 5]) == (4, 5)


def test_straggler_is_known_after_a_resume() -> None:
    line = BatchQueue(2, lookahead=2)
    line.begin([0, 3, 4], next_id=5)  # 1 and 2 were trained
    assert line.batch([3, 4, 5, 6]) is None
    assert line.batch([3, 4, 0]) == (0, 3)


def test_first_come_by_hand() -> None:
    line = BatchQueue(2, first_come=True)
    assert line.batch([7]) is None
    assert line.batch([7, 900, 0]) == (7, 900)  # by id, of those that came first
    line.train((7, 900))
    assert line.batch([7, 3]) is None  # it is not in the line any more
    assert line.batch([7, 3, 0]) == (0, 3)


def test_who_left_is_not_in_the_window_and_another_is() -> None:
    line = BatchQueue(2)
    line.leave([1])
    assert line.window() == [0, 2]
    line.leave([0, 3])
    assert line.window() == [2, 4]
    assert [group_id for group_id in range(7) if line.holds(group_id)] == [2, 4, 5, 6]


def test_who_is_awaited() -> None:
    strict, ahead, first = BatchQueue(2), BatchQueue(2, lookahead=2), BatchQueue(2, first_come=True)
    for line in (strict, ahead, first):
        line.leave([1])
    assert [g for g in range(6) if strict.is_awaited(g)] == [0, 2]
    assert [g for g in range(6) if ahead.is_awaited(g)] == [0, 2, 3]
    assert [g for g in range(6) if first.is_awaited(g)] == [0, 2, 3, 4, 5]


def test_line_of_a_run_that_goes_on() -> None:
    line = BatchQueue(3)
    line.begin([5, 3], next_id=7)
    assert line.window() == [3, 5, 7]
    assert [g for g in range(10) if line.holds(g)] == [3, 5, 7, 8, 9]
    line.begin([], next_id=4)
    assert line.window() == [4, 5, 6]
    assert not line.holds(3)
    line.begin([0, 2], next_id=3)
    assert line.window() == [0, 2, 3]


@settings(max_examples=300, deadline=None)
@given(
    size=st.integers(1, 4), lookahead=st.integers(1, 7), waiting=st.sets(st.integers(0, 20)),
    next_id=st.integers(0, 24),
)  # fmt: skip
def test_line_that_goes_on_is_never_stuck(size: int, lookahead: int, waiting: set[int], next_id: int) -> None:
    """Whoever of the others was trained, and whoever dropped: it is not known."""
    line = BatchQueue(size, lookahead)
    next_id = max(next_id, max(waiting, default=-1) + 1)
    line.begin(waiting, next_id)
    finished = sorted({*waiting, *range(next_id, 80)})
    batch = line.batch(finished)
    assert batch == tuple(finished[:size])
    line.train(batch)
    assert line.batch(finished[size:]) == tuple(finished[size : 2 * size])


# ---- groups without signal ----


@pytest.mark.parametrize(
    ("max_dropped", "has_signal", "dropped"),
    [
        (2, {0: False}, (0,)),
        (2, {0: True, 1: False}, (1,)),
        (2, {0: False, 1: False}, (0, 1)),
        (1, {0: False, 1: False}, (0,)),  # no more than so many
        (0, {0: False}, ()),
        (1, {1: False}, ()),  # 0 might be the one that is dropped
        (2, {1: False}, (1,)),  # though 0 were dropped
        (2, {1: False, 2: False}, (1,)),  # 0 might be the second
        (3, {2: False}, ()),  # 0 and 1 might be the batch
        (3, {0: True, 2: False}, ()),
        (3, {0: True, 1: True, 2: False}, ()),  # they are
        (3, {0: False, 2: False}, (0, 2)),  # 1 alone is none
        (4, {0: False, 3: False}, (0,)),  # 1 and 2 might be
    ],
)
def test_strict_line_drops_who_is_sure_to_be_dropped(
    max_dropped: int, has_signal: dict[int, bool], dropped: tuple[int, ...]
) -> None:
    line = BatchQueue(2, max_dropped=max_dropped)
    assert line.drop(has_signal) == dropped
    assert not any(line.holds(group_id) for group_id in dropped)
    rest = {g: s for g, s in has_signal.items() if g not in dropped}
    assert line.drop(rest) == ()  # nothing has changed since


@pytest.mark.parametrize("options", [{"lookahead": 2}, {"first_come": True}])
def test_elsewhere_whoever_comes_without_signal_is_dropped_until_the_batch_is_whole(options: dict) -> None:
    line = BatchQueue(2, **options, max_dropped=2)
    assert line.drop({1: False, 2: True}) == (1,)
    assert line.drop({2: True, 3: False}) == (3,)
    assert line.drop({2: True, 4: False}) == ()  # a third
    line.train([0, 2])
    assert line.drop({4: False}) == (4,)


def test_next_batch_may_drop_as_many_again() -> None:
    line = BatchQueue(1, max_dropped=1)
    assert line.drop({0: False, 1: False}) == (0,)
    assert line.batch([1]) == (1,)  # without signal, as no more may be dropped
    line.train([1])
    assert line.drop({2: False, 3: False}) == (2,)


def test_place_of_a_dropped_group_goes_to_the_next_in_the_line() -> None:
    line = BatchQueue(2, max_dropped=2)
    line.drop({0: False, 1: True})
    assert line.window() == [1, 2]
    assert line.batch([1]) is None
    assert line.batch([2, 1]) == (1, 2)


# ---- whole lines ----

Step = tuple[tuple[int, ...], tuple[int, ...]]  # a batch, and who was dropped for it


def play(
    line: BatchQueue, arrival: Sequence[int], signals: Sequence[bool], aside: set[int], takes: Sequence[bool]
) -> list[Step]:
    """Groups arrive in this order; batches are taken now and then, and at the end. As the buffer does it."""
    finished: dict[int, bool] = {}
    steps: list[Step] = []
    dropped: list[int] = []

    def settle() -> None:
        for group_id in line.drop(finished):
            finished.pop(group_id)
            dropped.append(group_id)

    def take() -> None:
        while (batch := line.batch(finished)) is not None:
            for group_id in batch:
                finished.pop(group_id)
            line.train(batch)
            steps.append((batch, tuple(sorted(dropped))))
            dropped.clear()
            settle()

    for group_id, is_taken in zip(arrival, itertools.cycle(takes), strict=False):
        if group_id in aside:
            line.leave([group_id])
        else:
            finished[group_id] = signals[group_id]
        settle()
        if is_taken:
            take()
    take()
    return steps


def slow_strict(size: int, max_dropped: int, signals: Sequence[bool], aside: set[int]) -> Iterator[Step]:
    """Batch after batch from the line's front, with everything known."""
    batch: list[int] = []
    dropped: list[int] = []
    for group_id, has_signal in enumerate(signals):
        if group_id in aside:
            continue
        if has_signal or len(dropped) == max_dropped:
            batch.append(group_id)
        else:
            dropped.append(group_id)
        if len(batch) == size:
            yield tuple(batch), tuple(dropped)
            batch, dropped = [], []


NUM = 16
ARRIVAL = st.permutations(range(NUM))
SIGNALS = st.lists(st.booleans(), min_size=NUM, max_size=NUM)
ASIDE = st.sets(st.integers(0, NUM - 1), max_size=4)
TAKES = st.lists(st.booleans(), min_size=1, max_size=5)


@settings(max_examples=400, deadline=None)
@given(
    size=st.integers(1, 4), max_dropped=st.integers(0, 6), arrival=ARRIVAL, signals=SIGNALS, aside=ASIDE,
    takes=TAKES,
)  # fmt: skip
def test_strict_batches_do_not_depend_on_who_finished_first(
    size: int, max_dropped: int, arrival: list[int], signals: list[bool], aside: set[int], takes: list[bool]
) -> None:
    steps = play(BatchQueue(size, max_dropped=max_dropped), arrival, signals, aside, takes)
    assert steps == list(slow_strict(size, max_dropped, signals, aside))


@settings(max_examples=400, deadline=None)
@given(size=st.integers(1, 4), lookahead=st.integers(1, 7), arrival=ARRIVAL, takes=TAKES)
def test_nobody_is_later_than_the_look_ahead_allows(
    size: int, lookahead: int, arrival: list[int], takes: list[bool]
) -> None:
    allowed = math.ceil((lookahead - 1) / size)
    steps = play(BatchQueue(size, lookahead), arrival, [True] * NUM, set(), takes)
    assert len(steps) == NUM // size  # nor does anybody wait for ever
    where = {group_id: index for index, (batch, _) in enumerate(steps) for group_id in batch}
    num_due = max(0, NUM // size - allowed) * size
    late = {g: where.get(g, NUM) - g // size for g in range(num_due)}
    assert max(late.values(), default=0) <= allowed


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("lookahead", [2, 3, 4, 5])
@pytest.mark.parametrize("slow", range(4))
def test_one_straggler_is_as_late_as_allowed_and_no_later(size: int, lookahead: int, slow: int) -> None:
    """Everybody else is there at once; it is there only when nothing goes on without it."""
    line, finished = BatchQueue(size, lookahead), set(range(60)) - {slow}
    for num_taken in itertools.count():
        batch = line.batch(sorted(finished))
        if batch is None:
            break
        finished -= set(batch)
        line.train(batch)
        assert num_taken < 20
    last = line.batch(sorted(finished | {slow}))
    assert last is not None
    assert slow in last
    late = num_taken - slow // size
    assert 1 <= late <= math.ceil((lookahead - 1) / size)


@settings(max_examples=400, deadline=None)
@given(
    size=st.integers(1, 4), lookahead=st.integers(1, 5), first_come=st.booleans(),
    max_dropped=st.integers(0, 6), arrival=ARRIVAL, signals=SIGNALS, aside=ASIDE, takes=TAKES,
)  # fmt: skip
def test_everybody_is_in_one_batch_or_left_the_line(
    size: int, lookahead: int, first_come: bool, max_dropped: int, arrival: list[int], signals: list[bool],
    aside: set[int], takes: list[bool],
) -> None:  # fmt: skip
    line = BatchQueue(size, 1 if first_come else lookahead, first_come, max_dropped)
    steps = play(line, arrival, signals, aside, takes)
    assert all(len(batch) == size and batch == tuple(sorted(batch)) for batch, _ in steps)
    assert all(len(dropped) <= max_dropped for _, dropped in steps)
    assert not any(signals[group_id] for _, dropped in steps for group_id in dropped)
    trained = [group_id for batch, _ in steps for group_id in batch]
    gone = [*trained, *(group_id for _, dropped in steps for group_id in dropped), *aside]
    assert len(gone) == len(set(gone))
    held = {group_id for group_id in range(NUM) if line.holds(group_id)}
    assert not held & set(gone)
    rest = set(range(NUM)) - held - set(gone)  # dropped for a batch that is not whole yet
    assert len(rest) <= max_dropped
    assert not any(signals[group_id] for group_id in rest)
    assert len(held) < size + lookahead - 1  # or there would be one more batch
